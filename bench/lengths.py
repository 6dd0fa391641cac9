"""How well the lengths of answers are predicted: history, signals, the learned table, and their blend.

    python -m bench.lengths [--answers FILE.json] [--trace FILE.csv]

Answers are the real model's own (`bench.answers` made the file), taken in their order: each is predicted from what was
known before it, by the executor's histograms and the scheduler's own code, and then learned from. The learned table is
trained on the earlier half; all are judged on the later half, by the mean error of p50 in tokens and by the share of
answers within p90. `--trace` adds history alone on a trace with the columns client and output_len, the VTC paper's
arena trace for one. The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.answers import ANSWERS
from bench.common import load_average, percentile
from executor_svc.histograms import Histograms
from executor_svc.names import Names
from jitney.columns import I64, U64
from jitney.errors import Away
from scheduler_svc.length_samples import Samples
from scheduler_svc.lengths.blend import UNKNOWN, Blend, Guess, Source
from scheduler_svc.lengths.predict import Asked, guess
from scheduler_svc.lengths.scale import length_of, log_of
from scheduler_svc.lengths.trees import LengthTable
from scheduler_svc.train_lengths import train

BLEND = "blend"
TIMED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Answers:
    """Requests in the order of their arrival, [N] each."""

    tenant: Sequence[int]
    endpoint: Sequence[int]
    features: U64
    prompt_tokens: I64
    output_tokens: I64
    most: int = 1 << 24  # tokens that an answer may have

    @property
    def count(self) -> int:
        """N."""
        return len(self.output_tokens)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one source, over the later half."""

    name: str
    mae_tokens: float | None
    p90_coverage: float | None
    us_per_request: float | None


@dataclass(frozen=True, slots=True)
class Predicted:
    """p50 and p90 in tokens, [N] each; 0 where nothing was said."""

    p50: I64
    p90: I64


def read_answers(path: Path) -> Answers:
    """What `bench.answers` wrote."""
    kept = json.loads(path.read_text())
    rows = kept["answers"]
    tenants, endpoints = Names(1 << 20), Names(1 << 16)
    return Answers(
        [tenants.number(row["tenant"]) for row in rows],
        [endpoints.number(row["endpoint"]) for row in rows],
        np.array([row["features"] for row in rows], np.uint64),
        np.array([row["prompt_tokens"] for row in rows], np.int64),
        np.array([row["output_tokens"] for row in rows], np.int64),
        kept["max_tokens"],
    )


def read_trace(path: Path) -> Answers:
    """A trace that has no prompts, only clients and lengths."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = Names(1 << 20)
    count = len(rows)
    return Answers(
        [names.number(row["client"]) for row in rows],
        [0] * count,
        np.zeros(count, np.uint64),
        np.array([int(row.get("prompt_len", 1)) for row in rows], np.int64),
        np.array([int(row["output_len"]) for row in rows], np.int64),
    )


def history_of(answers: Answers) -> I64:
    """p50 [N] that the executor's histograms say at each arrival, as logarithms; UNKNOWN at first."""
    histograms = Histograms()
    found = []
    for tenant, endpoint, length in zip(answers.tenant, answers.endpoint, answers.output_tokens.tolist(), strict=True):
        found.append(histograms.quantile(tenant, endpoint, 50))
        histograms.add(tenant, endpoint, length)
    p50 = np.array(found, np.int64)
    return np.where(p50 >= 0, log_of(p50), UNKNOWN)


def predict(answers: Answers, history: I64, table: LengthTable | None) -> dict[str, Predicted]:
    """What each source said of each answer before it was known, corrected by what came before; and the blend."""
    blend = Blend()
    said: dict[str, list[tuple[int, int]]] = {name: [] for name in (*(s.name.lower() for s in Source), BLEND)}
    for i in range(answers.count):
        asked = _asked(answers, history, slice(i, i + 1))
        corrected = blend.corrected(guess(asked, blend.signals, table))
        for source in Source:
            said[source.name.lower()].append((int(corrected.p50[source, 0]), int(corrected.p90[source, 0])))
        p50, p90 = blend.blended(corrected)
        said[BLEND].append((int(p50[0]), int(p90[0])))
        length = answers.output_tokens[i : i + 1]
        blend.learn(corrected, p90, length)
        blend.signals.learn(asked.features, log_of(length))
    return {name: _predicted(np.array(pairs, np.int64), answers.most) for name, pairs in said.items()}


def _predicted(logs: I64, most: int) -> Predicted:
    tokens = np.where(logs >= 0, np.minimum(length_of(logs), most), 0)
    return Predicted(tokens[:, 0], tokens[:, 1])


def _asked(answers: Answers, history: I64, rows: slice) -> Asked:
    unknown = np.full(len(history[rows]), UNKNOWN, np.int64)
    return Asked(answers.features[rows], answers.prompt_tokens[rows], history[rows], unknown)


def trained(answers: Answers, history50: I64) -> LengthTable | None:
    """The learned table of the earlier half; None without scikit-learn."""
    half = slice(answers.count // 2)
    samples = Samples(
        features=answers.features[half],
        prompt_tokens=answers.prompt_tokens[half],
        history=np.where(history50[half] >= 0, length_of(history50[half]), -1),
        generated_tokens=answers.output_tokens[half],
    )
    try:
        return train(samples)[0]
    except Away as error:
        print(f"without the learned table, whose fields are null: {error.message}", flush=True)
        return None


def judge(name: str, said: Predicted, answers: Answers, us: float | None) -> Figures:
    """Over the later half."""
    later = slice(answers.count // 2, None)
    p50, p90, lengths = said.p50[later], said.p90[later], answers.output_tokens[later]
    known = p50 > 0
    if not known.any():
        return Figures(name, None, None, None)
    return Figures(
        name,
        mae_tokens=round(float(np.abs(p50 - lengths)[known].mean()), 1),
        p90_coverage=round(float((lengths <= p90)[known].mean()), 3),
        us_per_request=round(us, 2) if us is not None else None,
    )


def costs_us(answers: Answers, history: I64, table: LengthTable | None) -> dict[str, float]:
    """Microseconds a request, of 64 at once: as many as a snapshot has candidates."""
    asked = _asked(answers, history, slice(TIMED_AT_ONCE))
    blend, histograms = Blend(), Histograms()
    for tenant, endpoint in zip(answers.tenant, answers.endpoint, strict=True):
        histograms.add(tenant, endpoint, 10)

    def look_up() -> None:
        for tenant, endpoint in zip(answers.tenant[:TIMED_AT_ONCE], answers.endpoint[:TIMED_AT_ONCE], strict=True):
            histograms.quantile(tenant, endpoint, 50)

    def all_sources() -> Guess:
        return guess(asked, blend.signals, table)

    costs = {
        Source.HISTORY.name.lower(): _timed(look_up),
        Source.SIGNALS.name.lower(): _timed(lambda: blend.signals.predict(asked.features)),
        BLEND: _timed(lambda: blend.blended(blend.corrected(all_sources()))),
    }
    without = _timed(lambda: guess(asked, blend.signals, None))
    costs[Source.LEARNED.name.lower()] = max(0.0, _timed(all_sources) - without)
    return {name: us / TIMED_AT_ONCE for name, us in costs.items()}


def _timed(work: Callable[[], object], repeats: int = 50) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter_ns()
        work()
        times.append((time.perf_counter_ns() - started) / 1e3)
    return percentile(times, 50)


def run(answers: Answers, trace: Answers | None) -> list[Figures]:
    """All sources on the answers, and history on the trace."""
    history = history_of(answers)
    table = trained(answers, history)
    costs = costs_us(answers, history, table)
    found = [judge(name, said, answers, costs[name]) for name, said in predict(answers, history, table).items()]
    if trace is not None:
        said = predict(trace, history_of(trace), None)
        found.append(judge("history_of_trace", said["history"], trace, costs["history"]))
    return found


def main() -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.lengths", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    parser.add_argument("--trace", type=Path, default=None, help="CSV with the columns client and output_len")
    options = parser.parse_args()
    answers = read_answers(options.answers)
    print(f"{answers.count} answers, the later half judged; {load_average()}")
    figures = run(answers, read_trace(options.trace) if options.trace else None)
    for each in figures:
        print(
            f"{each.name:18} error {each.mae_tokens} tokens, within p90 {each.p90_coverage}, {each.us_per_request} us"
        )
    print(json.dumps({"sources": [asdict(each) for each in figures]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
