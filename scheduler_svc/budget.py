"""What one step may spend: tokens, rows and device blocks, and the blocks that admission must leave alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jitney.columns import I64
from jitney.snapshot import Settings, Snapshot
from scheduler_svc.running import RunningRows
from scheduler_svc.step_time import StepSize

GROWTH_HORIZON_TOKENS = 8
"""A running row that fills its last block within so many tokens has its next block kept for it; within the steps of
the horizon, if they are more."""


@dataclass(slots=True)
class Budget:
    """What is left of the step. `blocks` are free now, `coming` will be once launched steps and copies have ended."""

    tokens: int
    rows: int
    blocks: int
    coming: int

    @classmethod
    def of(cls, snapshot: Snapshot, size: StepSize, padding: int) -> Budget:
        """The whole step, less a token for each padding row. Rows that are ending take no row of it, but still hold
        their blocks."""
        blocks = snapshot.blocks
        return cls(
            tokens=max(size.tokens - padding, 1),
            rows=size.rows,
            blocks=blocks.free + blocks.evictable + blocks.granted,
            coming=blocks.leaving + int(snapshot.ending.held_blocks.sum(dtype=np.int64)),
        )


@dataclass(frozen=True, slots=True)
class Reserve:
    """Blocks kept from admission: by configuration, for rows about to grow, for the whole growth of rows at their
    preemption bound, and for rows that joined a prefix whose owner might give up."""

    configured: int = 0
    growing: int = 0
    bound: int = 0
    joined: int = 0

    @property
    def blocks(self) -> int:
        """All of it."""
        return self.configured + self.growing + self.bound + self.joined


def growth_tokens(settings: Settings) -> int:
    """Tokens that a row may generate before admission must have left room for its next block."""
    return max(GROWTH_HORIZON_TOKENS, settings.horizon_steps)


def reserve_for(snapshot: Snapshot, rows: RunningRows, tokens: I64, ahead: I64) -> Reserve:
    """What to keep for `rows` [R], each of which will have computed `tokens` [R] more, and takes `ahead` [R] blocks in
    later steps of the horizon."""
    size = snapshot.settings.block_tokens
    held = rows.held + rows.growth_of(tokens)
    reached = np.maximum(rows.planned + tokens, rows.known)
    last = blocks_of(rows.final, size)
    grows = (held < last) & (held * size - reached < growth_tokens(snapshot.settings))
    bound, joined = rows.bound, rows.joined
    if not (np.count_nonzero(bound) or np.count_nonzero(joined)):
        return Reserve(snapshot.settings.block_reserve, growing=int(np.maximum(grows, ahead).sum()))
    grows &= ~(bound | joined)
    return Reserve(
        configured=snapshot.settings.block_reserve,
        growing=int(np.maximum(grows, ahead)[~bound].sum()),
        bound=int(np.maximum(last - held, 0)[bound].sum()),
        joined=int(np.maximum(blocks_of(rows.known, size) - held, 0)[joined & ~bound].sum()),
    )


def blocks_of(tokens: I64, block_tokens: int) -> I64:
    """Blocks that so many tokens fill, the last one perhaps in part."""
    blocks: I64 = -(-tokens // block_tokens)
    return blocks
