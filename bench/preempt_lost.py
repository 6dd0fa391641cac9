"""What preemptions cost, read off the decisions: seconds that requests lose, one by one and step by step.

Lost is the time in which a request that was preempted has not come back to the token where it was, that in which a
running row gets no token because there is no block for it, and by how much tokens that are computed again make a step
longer for every other row of it. What waits for its first row is not in it: how long that is depends on all that went
before, and two loads that differ in a single victim soon have little in common there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jitney.decision import Decision, PreemptionMode
from jitney.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class RowTime:
    """Seconds: of victims until they are back, of rows that sit out, of rows beside tokens that are computed again."""

    preemptions: int = 0
    swaps: int = 0
    away_s: float = 0.0
    stalled_s: float = 0.0
    slowed_s: float = 0.0

    @property
    def lost_s(self) -> float:
        """All of it."""
        return self.away_s + self.stalled_s + self.slowed_s


class Watch:
    """Follows the decisions of one executor, in their order."""

    def __init__(self, token_s: float) -> None:
        """`token_s`: what a token of a prefill takes."""
        self._token_s = token_s
        self._left_at: dict[int, int] = {}  # tokens that each victim had
        self.preemptions = self.swaps = 0
        self._away_us = self._stalled_us = 0
        self._again = 0  # tokens computed again, times the rows beside them

    @classmethod
    def over(cls, frames: Iterable[tuple[Snapshot, Decision]], token_s: float) -> RowTime:
        """All of a load."""
        watch, last = cls(token_s), None
        for snapshot, decision in frames:
            if last is not None:
                watch.see(*last, snapshot.now_us - last[0].now_us)
            last = (snapshot, decision)
        return watch.seen()

    def see(self, snapshot: Snapshot, decision: Decision, lasts_us: int) -> None:
        """A decision that holds so long."""
        rows, runs = snapshot.running, set(decision.run.id.tolist())
        reached = (rows.computed_tokens + rows.in_flight_tokens).tolist()
        behind = set()
        for row, tokens, loading in zip(rows.id.tolist(), reached, rows.loading.tolist(), strict=True):
            if tokens < self._left_at.get(row, 0):
                behind.add(row)
            elif not loading and row not in runs:
                self._stalled_us += lasts_us
        gone = np.isin(snapshot.waiting.id, np.array(list(self._left_at), np.uint64))
        self._away_us += lasts_us * (len(behind) + int(np.count_nonzero(gone)))
        ran = [*zip(decision.run.id.tolist(), decision.run.tokens.tolist(), strict=True)]
        ran += zip(decision.admit.id.tolist(), decision.admit.tokens.tolist(), strict=True)
        for row, tokens in ran:
            if row in behind or (row in self._left_at and row not in runs):
                self._again += tokens * (len(ran) - 1)
        places = {row: place for place, row in enumerate(rows.id.tolist())}
        for victim, mode in zip(decision.preempt.id.tolist(), decision.preempt.mode.tolist(), strict=True):
            self._left_at[victim] = max(reached[places[victim]], self._left_at.get(victim, 0))
            self.preemptions += 1
            self.swaps += mode != PreemptionMode.RECOMPUTE

    def seen(self) -> RowTime:
        """So far."""
        return RowTime(
            self.preemptions,
            self.swaps,
            self._away_us / 1e6,
            self._stalled_us / 1e6,
            self._again * self._token_s,
        )
