"""Which rows give way when running rows need more blocks than there are.

A victim's blocks come back later, by the cheaper of two ways (see costs). A recompute victim's blocks are free at
once; of a swap victim's only those that need not be stored, its last one among them. The others are leaving, one after
the other: a row that needs one of them sits out until it has gone.

Rows of the policy's highest class leave first, and of these the cheapest that free enough. Never a victim: the first
row of the policy's order, a row that waits for a prefix or computes one that another waits for, a row with a load in
flight, and a row at its preemption bound; the last rule gives way, from the end of the order, if otherwise no row at
all could run. A row that holds the whole pool and needs one block more can never go on: it leaves, and is refused
when it wants to board again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jitney.columns import I64, U64
from jitney.decision import PreemptionMode
from jitney.snapshot import Snapshot
from scheduler_svc.budget import Budget
from scheduler_svc.costs import Costs, cover_by_class, lost_tokens
from scheduler_svc.running import Flags, RunningRows


def _none() -> I64:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Relief:
    """Victims as positions in the rows' order, in the order of preemption; and who gets tokens now."""

    tokens: I64  # [R] as dealt, less victims and rows that sit out
    starved: Flags  # [R] rows that sit out for want of a block
    victims: I64 = field(default_factory=_none)
    modes: I64 = field(default_factory=_none)
    recompute_us: I64 = field(default_factory=_none)
    move_us: I64 = field(default_factory=_none)
    for_id: U64 = field(default_factory=lambda: np.empty(0, np.uint64))  # who gets the room; 0: a row needed a block
    freed: int = 0  # blocks, at once


def relieve(snapshot: Snapshot, rows: RunningRows, tokens: I64, budget: Budget) -> Relief:
    """Lets rows with `tokens` [R] have the blocks they need, in order, with victims if the blocks run out.

    Blocks that come free with launched steps and copies are waited for: one step costs less than a recompute.
    """
    growth = rows.growth_of(tokens)
    short = int(growth.sum()) - budget.blocks
    if short <= 0:
        return Relief(tokens, np.zeros(rows.count, np.bool_))
    costs = Costs.of(snapshot, rows, starving=short)
    stuck = (growth > 0) & (rows.held >= snapshot.blocks.total) & (snapshot.blocks.total > 0)
    if stuck.any():
        return _serve(rows, tokens, _recomputed(costs, np.flatnonzero(stuck)), costs, budget)
    allowed = may_leave(rows) & (rows.private > 0)
    victims = cover_by_class(
        costs.least_lost_us, rows.private + growth, allowed, short - budget.coming, rows.rank_class
    )
    relief = _serve(rows, tokens, _settled(costs, victims), costs, budget)
    coming = budget.coming or rows.loading.any() or (relief.modes != PreemptionMode.RECOMPUTE).any()
    if relief.tokens.any() or coming or not relief.starved.any():
        return relief
    return _serve(rows, tokens, _recomputed(costs, _forced(rows, relief)), costs, budget)


def may_leave(rows: RunningRows) -> Flags:
    """Rows that may be victims while anything else can run."""
    free = movable(rows)
    free[:1] = False
    return free


def movable(rows: RunningRows) -> Flags:
    """Rows that may be victims where another one boards, so that the first one need not stay."""
    free = ~(rows.bound | rows.loading)
    if np.count_nonzero(rows.joined):
        free &= ~rows.joined & ~np.isin(rows.id, rows.waits_for[rows.joined])
    return free


def coast_order(rows: RunningRows) -> U64:
    """Whom to preempt, in order, should blocks run out while no decision comes: of the highest class the least loss."""
    positions = (may_leave(rows) & (rows.private > 0)).nonzero()[0][::-1]
    lost, classes = lost_tokens(rows)[positions], rows.rank_class[positions]
    order = np.lexsort((lost, -classes)) if np.count_nonzero(classes) else np.argsort(lost, kind="stable")
    return rows.id[positions[order]]


def _settled(costs: Costs, victims: I64) -> Relief:
    """By the cheaper way each. The tokens are still to be dealt."""
    modes, moves = costs.settle(victims)
    return Relief(_none(), np.empty(0, np.bool_), victims, modes, costs.recompute.us[victims], moves)


def _recomputed(costs: Costs, victims: I64) -> Relief:
    """All by recompute: their blocks are needed now."""
    modes = np.full(len(victims), int(PreemptionMode.RECOMPUTE), np.int64)
    moves = np.full(len(victims), -1, np.int64)
    return Relief(_none(), np.empty(0, np.bool_), victims, modes, costs.recompute.us[victims], moves)


def _forced(rows: RunningRows, relief: Relief) -> I64:
    """Victims whatever their count, from the end of the order, until the first row that needs a block gets one."""
    keep = {0, int(np.argmax(relief.starved))}
    chosen, freed = relief.victims.tolist(), 0
    for position in range(rows.count - 1, -1, -1):
        if freed or position in keep:
            continue
        if position not in chosen and rows.private[position] > 0:
            chosen.append(position)
            freed += int(rows.private[position])
    return np.array(chosen, np.int64)


def _serve(rows: RunningRows, tokens: I64, relief: Relief, costs: Costs, budget: Budget) -> Relief:
    """Deals the blocks to the rows that stay, in order."""
    stays = np.ones(rows.count, np.bool_)
    stays[relief.victims] = False
    freed = int(costs.freed(relief.victims, relief.modes).sum())
    growth = np.where(stays, rows.growth_of(tokens), 0)
    fits = (growth == 0) | (np.cumsum(growth) <= budget.blocks + freed)
    return Relief(
        tokens=np.where(stays & fits, tokens, 0),
        starved=stays & ~fits & (tokens > 0),
        victims=relief.victims,
        modes=relief.modes,
        recompute_us=relief.recompute_us,
        move_us=relief.move_us,
        for_id=np.zeros(len(relief.victims), np.uint64),
        freed=freed,
    )
