"""How long a decision holds, and the blocks that its rows take meanwhile.

Within its horizon the executor lets the rows that run go on by itself: a decode by one token a step, a prefill by a
chunk. The blocks for that are kept from admission; where even running rows would go short of them, the decision holds
for fewer steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jitney.columns import I64
from jitney.snapshot import HorizonKind, Snapshot
from scheduler_svc.budget import blocks_of
from scheduler_svc.running import RunningRows


@dataclass(frozen=True, slots=True)
class Horizon:
    """`growth` [R]: blocks that each row takes within `steps`."""

    kind: HorizonKind
    steps: int
    growth: I64

    def without(self, victims: I64) -> Horizon:
        """As it is for the rows but `victims`."""
        if len(victims) == 0:
            return self
        growth = self.growth.copy()
        growth[victims] = 0
        return replace(self, growth=growth)

    @property
    def needed_blocks(self) -> int:
        """Of all rows."""
        return int(self.growth.sum())


def horizon_of(snapshot: Snapshot, rows: RunningRows, tokens: I64, blocks: int) -> Horizon:
    """Of a decision in which `rows` [R] compute `tokens` [R], with so many `blocks` to be had: as configured, or the
    most steps for which they suffice. Until an event: shortage is one, so that only the first step is planned."""
    settings = snapshot.settings
    steps = settings.horizon_steps
    if settings.horizon_kind is HorizonKind.UNTIL_EVENT or steps == 1:
        return Horizon(settings.horizon_kind, steps, rows.growth_of(tokens))
    growth = growth_within(rows, tokens, steps, settings.chunk_cap_tokens)
    low, high = 1, steps
    if int(growth.sum()) <= blocks:
        low = high
    while low < high:
        middle = (low + high + 1) // 2
        growth = growth_within(rows, tokens, middle, settings.chunk_cap_tokens)
        low, high = (middle, high) if int(growth.sum()) <= blocks else (low, middle - 1)
    return Horizon(settings.horizon_kind, low, growth_within(rows, tokens, low, settings.chunk_cap_tokens))


def growth_within(rows: RunningRows, tokens: I64, steps: int, chunk_cap: int) -> I64:
    """Blocks [R] that rows take in `steps` steps, the first of which gives them `tokens` [R]; none, if that is 0."""
    reached = rows.planned + tokens
    prefill_steps = -(-(rows.known - reached) // chunk_cap)
    decoded = np.maximum(steps - 1 - prefill_steps, 0)
    reached = np.minimum(np.minimum(rows.known, reached + chunk_cap * (steps - 1)) + decoded, rows.final)
    return np.where(tokens > 0, np.maximum(blocks_of(reached, rows.block_tokens) - rows.held, 0), 0)
