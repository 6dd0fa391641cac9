"""Answers of the past to learn lengths from: out of decision logs, and out of traces as CSV.

A trace has a header; its columns are found by the names that public traces use. What it does not have (tenant,
endpoint, features) is taken as equal for all. Rows are in the order in which the requests came; what history said of
each is reckoned from those before it, as an executor does.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from jitney.columns import HISTOGRAM_BUCKETS, I64, U64
from jitney.errors import InvalidRequest, Missing
from jitney.log_segments import LogReader
from jitney.scheduler_codec import decode_snapshot
from jitney.snapshot import Outcome
from scheduler_svc.lengths.history import BUCKET
from scheduler_svc.lengths.scale import length_of, log_of

PROMPT: Final = ("prompt_tokens", "prompt_len", "input_length", "num_prefill_tokens", "ContextTokens")
OUTPUT: Final = (
    "generated_tokens",
    "output_tokens",
    "output_len",
    "output_length",
    "num_decode_tokens",
    "GeneratedTokens",
)
TENANT: Final = ("tenant", "client")
ENDPOINT: Final = ("endpoint",)
FEATURES: Final = ("features",)
_WINDOW: Final = 512
_WHOLE: Final = (Outcome.STOP, Outcome.LENGTH)


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer; `history` is the length that history said before it, -1 none."""

    features: int
    prompt_tokens: int
    generated_tokens: int
    history: int


@dataclass(frozen=True, slots=True)
class Samples:
    """[N] each, in order."""

    features: U64
    prompt_tokens: I64
    generated_tokens: I64
    history: I64

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Samples:
        """As columns."""
        rows = list(samples)
        return cls(
            np.array([row.features for row in rows], np.uint64),
            np.array([row.prompt_tokens for row in rows], np.int64),
            np.array([row.generated_tokens for row in rows], np.int64),
            np.array([row.history for row in rows], np.int64),
        )


def read_samples(path: Path) -> Samples:
    """Of a decision log (a folder or segment) or of a CSV file. Missing or InvalidRequest for what is neither."""
    if not path.exists():
        raise Missing(f"there is no log or trace at {path}", field="source", value=path)
    if path.is_file() and path.suffix == ".csv":
        return Samples.of(_of_trace(path))
    return Samples.of(_of_log(path))


def _of_log(path: Path) -> Iterator[Sample]:
    """Each ended request once: it is told until a snapshot that told it was answered."""
    seen: set[tuple[int, int]] = set()
    with LogReader(path) as log:
        for frame in log:
            snapshot = decode_snapshot(frame.snapshot)
            ended = snapshot.ended
            features = ended.features.tolist() or [0] * ended.rows
            columns = (ended.id, ended.outcome, ended.prompt_tokens, ended.generated_tokens, ended.predicted_p50)
            for packed, id_, outcome, prompt, generated, history in zip(
                features, *(column.tolist() for column in columns), strict=True
            ):
                known = (snapshot.incarnation, id_)
                if known in seen or outcome not in _WHOLE or generated < 1:
                    continue
                seen.add(known)
                yield Sample(packed, prompt, generated, history)


def _of_trace(path: Path) -> Iterator[Sample]:
    past: dict[tuple[str, str], I64] = {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        there = rows.fieldnames or ()
        prompt, output = _column(there, PROMPT, path), _column(there, OUTPUT, path)
        tenant, endpoint, features = (
            next((name for name in names if name in there), "") for names in (TENANT, ENDPOINT, FEATURES)
        )
        for number, row in enumerate(rows, 2):
            try:
                asked, answered = int(row[prompt]), int(row[output])
                packed = int(row[features]) if features else 0
            except (TypeError, ValueError):
                raise InvalidRequest(f"{path}, line {number}: not a number", field="source", value=number) from None
            if answered < 1:
                continue
            pair = row.get(tenant, ""), row.get(endpoint, "")
            counts = past.setdefault(pair, np.zeros(HISTOGRAM_BUCKETS, np.int64))
            yield Sample(packed, asked, answered, _median(counts))
            bucket = -(-int(log_of(np.array([answered]))[0]) // BUCKET)
            counts[min(bucket, HISTOGRAM_BUCKETS - 1)] += 16
            if counts.sum() >= 16 * _WINDOW:
                counts >>= 1


def _median(counts: I64) -> int:
    total = np.cumsum(counts)
    if not total[-1]:
        return -1
    return int(length_of(BUCKET * np.searchsorted(2 * total, total[-1:]))[0])


def _column(there: Iterable[str], names: tuple[str, ...], path: Path) -> str:
    found = next((name for name in names if name in there), None)
    if found is None:
        limit = ", ".join(names)
        raise InvalidRequest(f"{path} has none of the columns {limit}", field="source", limit=limit, value=path)
    return found
