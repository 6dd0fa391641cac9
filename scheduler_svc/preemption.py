"""Which rows give way when running rows need more blocks than there are, and what that costs.

A victim's blocks come back later, by the cheaper of two ways:

    recompute = tokens lost / prefill rate
    move      = bytes not yet lower down / rate out + bytes to bring back / rate in + wait in the copy queues

Blocks that others hold are neither freed nor lost. Tokens lost are all of prompt and answer, or what a row in its
prefill has computed: the rest of a prompt has to be computed either way. A recompute victim's blocks are free at
once; those of a swap victim are leaving, so the row that needs one sits out until they have gone.

Never a victim: the first row of the policy's order, a row that waits for a prefix or computes one that another waits
for, a row with a load in flight, and a row at its preemption bound; the last rule gives way, from the end of the
order, if otherwise no row at all could run. A row that holds the whole pool and needs one block more can never go on:
it leaves, and is refused when it wants to board again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jitney.columns import I64, U64
from jitney.decision import PreemptionMode
from jitney.snapshot import Rates, Snapshot, TierRoom
from scheduler_svc.budget import Budget
from scheduler_svc.running import Flags, RunningRows

ASSUMED_PREFILL_TOKENS_PER_S = 1_000
"""Stands in for a rate that is not known yet."""
MAX_BLOCK_NS = 1 << 30
"""A slower copy costs no more: keeps sums within 64 bits, whatever rate was measured."""


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
    freed: int = 0  # blocks, at once


def relieve(snapshot: Snapshot, rows: RunningRows, tokens: I64, budget: Budget) -> Relief:
    """Lets rows with `tokens` [R] have the blocks they need, in order, with victims if the blocks run out.

    Blocks that come free with launched steps and copies are waited for: one step costs less than a recompute.
    """
    growth = rows.growth_of(tokens)
    short = int(growth.sum()) - budget.blocks
    if short <= 0:
        return Relief(tokens, np.zeros(rows.count, np.bool_))
    costs = _Costs.of(snapshot, rows)
    stuck = (growth > 0) & (rows.held >= snapshot.blocks.total) & (snapshot.blocks.total > 0)
    if stuck.any():
        return _serve(rows, tokens, costs.recomputed(np.flatnonzero(stuck)), budget)
    allowed = may_leave(rows) & (rows.private > 0)
    victims = cheapest_cover(costs.least_us, rows.private + growth, allowed, short - budget.coming)
    relief = _serve(rows, tokens, costs.settle(victims, snapshot), budget)
    coming = budget.coming or rows.loading.any() or (relief.modes != PreemptionMode.RECOMPUTE).any()
    if relief.tokens.any() or coming or not relief.starved.any():
        return relief
    return _serve(rows, tokens, costs.recomputed(_forced(rows, relief)), budget)


def may_leave(rows: RunningRows) -> Flags:
    """Rows that may be victims while anything else can run."""
    free = ~(rows.bound | rows.loading | rows.joined)
    free[:1] = False
    if rows.joined.any():
        free &= ~np.isin(rows.id, rows.waits_for[rows.joined])
    return free


def coast_order(rows: RunningRows) -> U64:
    """Whom to preempt, in order, should blocks run out while no decision comes: the least loss first."""
    positions = np.flatnonzero(may_leave(rows) & (rows.private > 0))[::-1]
    return rows.id[positions[np.argsort(lost_tokens(rows)[positions], kind="stable")]]


def lost_tokens(rows: RunningRows) -> I64:
    """Tokens [R] that have to be computed again."""
    done = np.where(rows.known - rows.planned <= 1, rows.known, rows.planned)
    return np.maximum(done - rows.shared * rows.block_tokens, 0)


@dataclass(frozen=True, slots=True)
class _Costs:
    """[R] each; -1 where a move is not possible."""

    recompute_us: I64
    cpu_us: I64
    ssd_us: I64
    store: I64  # blocks to be stored
    pin: I64  # blocks to be brought back

    @classmethod
    def of(cls, snapshot: Snapshot, rows: RunningRows) -> _Costs:
        rates = snapshot.rates
        speed = rates.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S
        full = np.minimum(rows.planned // rows.block_tokens, rows.held)
        pin = np.maximum(full - rows.shared, 0)
        store = np.maximum(pin - rows.lower, 0)
        cpu_us = _move_us(store, pin, rates, snapshot.cpu, ssd=False)
        ssd_us = _move_us(store, pin, rates, snapshot.ssd, ssd=True)
        ssd_us += np.where(ssd_us >= 0, snapshot.cpu.queue_us, 0)
        return cls(lost_tokens(rows) * 1_000_000 // speed, cpu_us, ssd_us, store, pin)

    @property
    def least_us(self) -> I64:
        least = self.recompute_us
        for move in (self.cpu_us, self.ssd_us):
            least = np.where(move >= 0, np.minimum(least, move), least)
        return least

    def settle(self, victims: I64, snapshot: Snapshot) -> Relief:
        """The mode of each victim, while the tiers have room. The tokens are still to be dealt."""
        tiers = (
            (PreemptionMode.SWAP_CPU, self.cpu_us, [snapshot.cpu.free_blocks, snapshot.cpu.pin_blocks]),
            (PreemptionMode.SWAP_SSD, self.ssd_us, [snapshot.ssd.free_blocks, snapshot.ssd.pin_blocks]),
        )
        modes, moves = [], []
        for victim in victims.tolist():
            store, pin = int(self.store[victim]), int(self.pin[victim])
            options = [
                (int(move[victim]), mode, room)
                for mode, move, room in tiers
                if move[victim] >= 0 and room[0] >= store and room[1] >= pin
            ]
            best = min(options, key=lambda option: option[:2], default=None)
            moves.append(best[0] if best else -1)
            if best and best[0] < self.recompute_us[victim]:
                modes.append(int(best[1]))
                best[2][0] -= store
                best[2][1] -= pin
            else:
                modes.append(int(PreemptionMode.RECOMPUTE))
        return self._relief(victims, np.array(modes, np.int64), np.array(moves, np.int64))

    def recomputed(self, victims: I64) -> Relief:
        """All by recompute: their blocks are needed now."""
        modes = np.full(len(victims), int(PreemptionMode.RECOMPUTE), np.int64)
        return self._relief(victims, modes, np.full(len(victims), -1, np.int64))

    def _relief(self, victims: I64, modes: I64, move_us: I64) -> Relief:
        return Relief(_none(), np.empty(0, np.bool_), victims, modes, self.recompute_us[victims], move_us)


def _move_us(store: I64, pin: I64, rates: Rates, room: TierRoom, *, ssd: bool) -> I64:
    """Microseconds [R] to store and to bring back through the CPU tier, or through it to the SSD; -1: not possible."""
    out_rates, in_rates = [rates.to_host_bytes_per_s], [rates.to_device_bytes_per_s]
    if ssd:
        out_rates.append(rates.ssd_write_bytes_per_s)
        in_rates.append(rates.ssd_read_bytes_per_s)
    if not rates.block_bytes or not room.pin_blocks or not all(out_rates + in_rates):
        return np.full(len(store), -1, np.int64)
    cost = np.full(len(store), room.queue_us, np.int64)
    for blocks, speeds in ((store, out_rates), (pin, in_rates)):
        block_ns = sum(rates.block_bytes * 1_000_000_000 // speed for speed in speeds)
        cost += blocks * min(block_ns, MAX_BLOCK_NS) // 1000
    return np.where((store <= room.free_blocks) & (pin <= room.pin_blocks), cost, -1)


def cheapest_cover(cost: I64, gain: I64, allowed: Flags, need: int) -> I64:
    """Positions whose gains reach `need` at little cost, or all allowed ones if they cannot.

    The greedy cover by cost per block, each of its prefixes tried with the cheapest single row that completes it: at
    most twice the least cost, and the least if one row is (Csirik et al., "Heuristics for the 0-1 min-knapsack
    problem", 1991). Rows that the others make needless are dropped. Ties go against the later row.
    """
    positions = np.flatnonzero(allowed)[::-1]
    if need <= 0 or len(positions) == 0:
        return _none()
    cost, gain = cost[positions], gain[positions]
    by_rate = np.argsort(cost * 1024 // gain, kind="stable")
    best: list[int] = []
    best_cost, spent, missing = 0, 0, need
    outside = np.ones(len(positions), np.bool_)
    for taken, chosen in enumerate(by_rate.tolist()):
        enough = np.flatnonzero(outside & (gain >= missing))
        if len(enough):
            last = int(enough[np.argmin(cost[enough])])
            if not best or spent + int(cost[last]) < best_cost:
                best, best_cost = [*by_rate[:taken].tolist(), last], spent + int(cost[last])
        outside[chosen] = False
        spent, missing = spent + int(cost[chosen]), missing - int(gain[chosen])
        if missing <= 0 or (best and spent >= best_cost):
            break
    if not best:
        return positions[by_rate]
    spare = sum(int(gain[row]) for row in best) - need
    for row in sorted(best, key=lambda row: (-int(cost[row]), row)):
        if int(gain[row]) <= spare:
            best.remove(row)
            spare -= int(gain[row])
    return positions[best]


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


def _serve(rows: RunningRows, tokens: I64, relief: Relief, budget: Budget) -> Relief:
    """Deals the blocks to the rows that stay, in order."""
    stays = np.ones(rows.count, np.bool_)
    stays[relief.victims] = False
    at_once = relief.victims[relief.modes == PreemptionMode.RECOMPUTE]
    freed = int(rows.private[at_once].sum())
    growth = np.where(stays, rows.growth_of(tokens), 0)
    fits = (growth == 0) | (np.cumsum(growth) <= budget.blocks + freed)
    return Relief(
        tokens=np.where(stays & fits, tokens, 0),
        starved=stays & ~fits & (tokens > 0),
        victims=relief.victims,
        modes=relief.modes,
        recompute_us=relief.recompute_us,
        move_us=relief.move_us,
        freed=freed,
    )
