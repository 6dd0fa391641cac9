"""From what was measured to the table and the last line. Pure: records in, figures out.

A record is one line of JSON. A ratio is taken within a round, and shown as the median and the range over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from bench.peers.loads import LOADS

OURS: Final = "jitney"
OURS_INT8: Final = "jitney int8"
Precision = Literal["fp16", "quantised"]  # fp16: at least that


@dataclass(frozen=True, slots=True)
class Measured:
    """One load, served once by one peer. `tokens_per_s`: generated ones; of a prefill, tokens of prompts."""

    round: int
    load: str
    peer: str
    precision: Precision
    slots: int
    requests: int
    tokens_per_s: float
    ttft_ms_mean: float
    ttft_ms_p99: float
    gap_ms_mean: float
    gap_ms_p99: float
    peak_mib: float
    seconds: float
    others_cores: float
    cut: bool = False
    kind: Literal["measured"] = "measured"


@dataclass(frozen=True, slots=True)
class Tried:
    """A trial of a number of slots."""

    load: str
    peer: str
    slots: int
    tokens_per_s: float
    kind: Literal["tried"] = "tried"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the machine can do: reading from memory, and fp32 products of large matrices."""

    round: int
    gb_per_s: float
    gflop_per_s: float
    kind: Literal["capacity"] = "capacity"


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that cannot be had or run here, and why. `load` empty: in no load."""

    peer: str
    reason: str
    load: str = ""
    kind: Literal["absent"] = "absent"


@dataclass(frozen=True, slots=True)
class Left:
    """A peer that is not measured in further rounds: it was under `below` of the best one in a round."""

    load: str
    peer: str
    share_of_best: float
    below: float
    kind: Literal["left"] = "left"


Record = Measured | Tried | Capacity | Absent | Left
_KINDS: Final[dict[str, type[Record]]] = {
    "measured": Measured,
    "tried": Tried,
    "capacity": Capacity,
    "absent": Absent,
    "left": Left,
}


def from_json(fields: dict[str, Any]) -> Record:
    """A record as it was written. Raises KeyError or TypeError for what is none."""
    return _KINDS[fields["kind"]](**fields)


def to_json(record: Record) -> dict[str, Any]:
    """As it is written."""
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in asdict(record).items()}


@dataclass(frozen=True, slots=True)
class Range:
    """Median, least and greatest of several rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Range | None:
        """None of no values."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits: int = 0) -> str:
        """Like 207 (198-214)."""
        if self.rounds == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


class Results:
    """All that was measured so far."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records = list(records)

    def measured(self, load: str, peer: str | None = None) -> list[Measured]:
        """In order."""
        return [
            record
            for record in self.records
            if isinstance(record, Measured) and record.load == load and peer in (None, record.peer)
        ]

    def has(self, load: str, peer: str, round_number: int) -> bool:
        """Whether that was measured already."""
        return any(record.round == round_number for record in self.measured(load, peer))

    def peers(self, load: str) -> list[str]:
        """Who was measured, as first seen."""
        return list(dict.fromkeys(record.peer for record in self.measured(load)))

    def tried(self, load: str, peer: str) -> dict[int, float]:
        """Tokens/s of the trials, by slots."""
        return {
            record.slots: record.tokens_per_s
            for record in self.records
            if isinstance(record, Tried) and (record.load, record.peer) == (load, peer)
        }

    def is_left(self, load: str, peer: str) -> bool:
        """Whether it is measured no more in this load."""
        return any(isinstance(record, Left) and (record.load, record.peer) == (load, peer) for record in self.records)

    def is_absent(self, load: str, peer: str) -> bool:
        """Whether it is known not to run."""
        return any(
            isinstance(record, Absent) and record.peer == peer and record.load in ("", load) for record in self.records
        )

    def speed(self, load: str, peer: str) -> Range | None:
        """Its tokens/s over the rounds."""
        return Range.of([record.tokens_per_s for record in self.measured(load, peer)])

    def best_peer(self, load: str, precisions: Sequence[str] = ("fp16", "quantised")) -> str | None:
        """The fastest that is not ours, by its median."""
        best, name = 0.0, None
        for record in self.measured(load):
            speed = self.speed(load, record.peer)
            if record.peer in (OURS, OURS_INT8) or record.precision not in precisions or speed is None:
                continue
            if speed.median > best:
                best, name = speed.median, record.peer
        return name

    def ratio(
        self, load: str, ours: str = OURS, precisions: Sequence[str] = ("fp16", "quantised")
    ) -> tuple[Range, str] | None:
        """Ours over the best peer, round by round, and which peer that is. None if one of them is missing."""
        peer = self.best_peer(load, precisions)
        if peer is None:
            return None
        theirs = {record.round: record.tokens_per_s for record in self.measured(load, peer)}
        found = Range.of(
            [
                record.tokens_per_s / theirs[record.round]
                for record in self.measured(load, ours)
                if theirs.get(record.round)
            ]
        )
        return (found, peer) if found is not None else None

    def too_slow(self, load: str, below: float) -> list[Left]:
        """Peers under `below` of the best peer in this load that are not left yet."""
        best = self.best_peer(load)
        top = self.speed(load, best) if best is not None else None
        left = []
        for peer in self.peers(load):
            speed = self.speed(load, peer)
            if top is None or speed is None or peer in (OURS, OURS_INT8) or self.is_left(load, peer):
                continue
            if speed.median < below * top.median:
                left.append(Left(load, peer, speed.median / top.median, below))
        return left

    def capacity(self) -> tuple[Range, Range] | None:
        """Gigabytes a second and GFLOP/s."""
        found = [record for record in self.records if isinstance(record, Capacity)]
        bandwidth = Range.of([record.gb_per_s for record in found])
        products = Range.of([record.gflop_per_s for record in found])
        return (bandwidth, products) if bandwidth is not None and products is not None else None


def last_line(results: Results, roofline_b32: float | None) -> dict[str, object]:
    """The headline. None where something was not measured; `ratio_prefill` is the lesser of both lengths.

    `roofline_b32` is tokens/s.
    """

    def rounded(found: tuple[Range, str] | None) -> float | None:
        return round(found[0].median, 3) if found is not None else None

    prefills = [rounded(results.ratio(load, precisions=("fp16",))) for load in LOADS if LOADS[load].prefill]
    known = [ratio for ratio in prefills if ratio is not None]
    ours, batch32 = results.speed("decode_heavy", OURS), results.speed("batch32", OURS)
    return {
        "ratio_decode_heavy": rounded(results.ratio("decode_heavy")),
        "ratio_mixed": rounded(results.ratio("mixed")),
        "ratio_batch1": rounded(results.ratio("batch1", precisions=("fp16",))),
        "ratio_batch1_int8": rounded(results.ratio("batch1", ours=OURS_INT8)),
        "ratio_prefill": min(known) if len(known) == len(prefills) else None,
        "best_peer": results.best_peer("decode_heavy"),
        "fraction_of_roofline_b32": (
            round(batch32.median / roofline_b32, 3) if batch32 is not None and roofline_b32 is not None else None
        ),
        "ours_tokens_per_s": round(ours.median, 1) if ours is not None else None,
    }


def table(results: Results) -> list[str]:
    """A line for each load and peer, fastest first."""
    lines = [
        f"{'load':13} {'peer':26} {'slots':>5} {'tokens/s':>18} {'ours over it':>18} {'TTFT ms, p99':>15} "
        f"{'gap ms, p99':>13} {'MiB':>6} {'others':>6}"
    ]
    for load in LOADS:
        peers = results.peers(load)
        for peer in sorted(peers, key=lambda name: -(results.speed(load, name) or Range(0, 0, 0, 0)).median):
            lines.append(_row(results, load, peer))
    return lines


def _row(results: Results, load: str, peer: str) -> str:
    rounds = results.measured(load, peer)
    speed = results.speed(load, peer)
    ours = {record.round: record.tokens_per_s for record in results.measured(load, OURS)}
    over = Range.of([ours[record.round] / record.tokens_per_s for record in rounds if record.round in ours])

    def middle(name: str) -> float:
        return float(statistics.median(getattr(record, name) for record in rounds))

    return (
        f"{load:13} {peer:26} {rounds[-1].slots:5d} {speed.text(1) if speed else '-':>18} "
        f"{over.text(2) if over and peer != OURS else '-':>18} "
        f"{middle('ttft_ms_mean'):7.0f} {middle('ttft_ms_p99'):7.0f} "
        f"{middle('gap_ms_mean'):6.1f} {middle('gap_ms_p99'):6.0f} {middle('peak_mib'):6.0f} "
        f"{max(record.others_cores for record in rounds):6.2f}"
    )
