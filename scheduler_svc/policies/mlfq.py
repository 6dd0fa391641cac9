"""Multi-level feedback queues: short answers first, without knowing which ones are short."""

from __future__ import annotations

from math import isqrt
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from jitney.columns import HISTOGRAM_BUCKETS, I32, I64, PolicyColumnUpdates, RunningTable, WaitingTable
from jitney.snapshot import Snapshot
from scheduler_svc.policies.base import Parameter, Policy, Ranking, policy_columns

LEAST_SAMPLES = 20
"""Fewer ended requests say nothing about lengths."""
PERCENTILES = (50, 80, 95, 99)
USUAL_TOKENS = (128, 384, 768, 1536)
"""Stand in for the percentiles of a histogram that is empty yet."""


class Mlfq(Policy):
    """Requests start on the top level and sink by one when they have used up its quantum of generated tokens; on a
    level, by arrival. A waiting request takes the place of running ones on lower levels. Every so often all are
    boosted: they start again on the top level, so that nothing starves.

    Without other quanta, levels end at the median, p80, p95 and p99 of recent answers: half of all requests finish on
    the top level. A request's memory: a, what it had generated when it was last boosted; b, which boost that was.
    """

    name: ClassVar[str] = "mlfq"
    summary: ClassVar[str] = "Levels by tokens generated since the last boost; those on higher levels preempt."
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("levels", "How many levels there are", 3, 5, 4),
        *(
            Parameter(f"quantum_{n}", f"Tokens to be generated on level {n}; 0: by recent lengths", 0, 1 << 20, 0)
            for n in range(1, 5)
        ),
        Parameter("boost_s", "Seconds between two boosts", 1, 3600, 30),
        Parameter("preempt", "1: waiting requests take the place of running ones on lower levels", 0, 1, 1),
    )
    waiting_columns: ClassVar[tuple[str, ...]] = ("arrival_us", "generated_tokens")
    tables: ClassVar[tuple[str, ...]] = ("histograms",)

    def rank(self, snapshot: Snapshot, memory: bytes) -> Ranking:
        """By (level, arrival)."""
        run, wait = snapshot.running, snapshot.waiting
        every_us = self.value("boost_s") * 1_000_000
        boost = snapshot.now_us // every_us + 1
        ends = self.level_ends(snapshot)
        new = run.policy_b != boost
        running = _level(run.generated_tokens, run.policy_a, run.policy_b == boost, ends)
        base, boosted = policy_columns(snapshot)
        waiting = _level(wait.generated_tokens, base, boosted == boost, ends)
        updates = PolicyColumnUpdates(
            id=run.id[new],
            a=run.generated_tokens[new].astype(np.int64),
            b=np.full(int(np.count_nonzero(new)), boost, np.int64),
        )
        wake_at_us = boost * every_us if waiting.any() else 0
        if not self.value("preempt"):
            return Ranking((running, run.arrival_us), (waiting, wait.arrival_us), None, None, wake_at_us, b"", updates)
        return Ranking((run.arrival_us,), (wait.arrival_us,), running, waiting, wake_at_us, b"", updates)

    def says(self, snapshot: Snapshot, table: RunningTable | WaitingTable, row: int, ranking: Ranking) -> str:
        """Its level."""
        waits = table is snapshot.waiting
        levels = ranking.waiting_class if waits else ranking.running_class
        level = (ranking.waiting if waits else ranking.running)[0] if levels is None else levels
        place = f"it is on level {int(level[row]) + 1} of {self.value('levels')}, "
        return place + super().says(snapshot, table, row, ranking)

    def level_ends(self, snapshot: Snapshot) -> I64:
        """Tokens generated since the last boost at which a request leaves each level but the last, rising."""
        quanta = [self.value(f"quantum_{n}") for n in range(1, self.value("levels"))]
        counts = snapshot.histograms.counts.reshape(-1, HISTOGRAM_BUCKETS).sum(axis=0, dtype=np.int64)
        total, below = int(counts.sum()), np.cumsum(counts)
        ends: list[int] = []
        for quantum, percent, usual in zip(quanta, PERCENTILES, USUAL_TOKENS, strict=False):
            if total >= LEAST_SAMPLES:
                usual = isqrt(1 << int(np.argmax(below * 100 >= percent * total)))
            last = ends[-1] if ends else 0
            ends.append(last + quantum if quantum else max(usual, last + 1))
        return np.array(ends, np.int64)


def _level(generated: I32, base: I64, current: NDArray[np.bool_], ends: I64) -> I64:
    """0 is the top; what was not told of the current boost starts there."""
    used = np.where(current, generated - base, 0)
    return np.searchsorted(ends, used, side="right").astype(np.int64)
