"""What it costs to take a running row's blocks away and to bring them back, and the cheapest rows that free enough.

    recompute = tokens lost / prefill rate + time per context token * context tokens that their chunks read
    move      = bytes not yet lower down / rate out + bytes to bring back / rate in + wait in the copy queues

The wait is that for what is leaving already, for loads that are queued, and for victims of the same decision.
Blocks that others hold are neither freed nor lost. Tokens lost are all of prompt and answer, or what a row in its
prefill has computed: the rest of a prompt has to be computed either way.

These are the times that decisions tell. They are compared by whom they keep waiting: tokens that are computed again
make the step longer for every row of it, a copy out keeps waiting the rows that need the blocks, and a copy in only the
row itself.

    recompute is dearer if  recompute * rows  >  time that rows wait for blocks that are copied out
                                                 + half of copy out + copy in

Half of the copy out, since so long, on the average, nobody has the victim's blocks: a row less fits meanwhile, as while
they are filled again.

What need not be stored, the last block at least, is free at once; the others come free one by one while they are copied
out. Rows that decode want one each in as many steps as a block has tokens: where copies keep up with that, nobody waits
but those that want more at once than is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jitney.columns import I64
from jitney.decision import PreemptionMode
from jitney.snapshot import LowerTiers, Rates, Snapshot, TierRoom
from scheduler_svc.running import Flags, RunningRows
from scheduler_svc.step_time import StepTime

ASSUMED_PREFILL_TOKENS_PER_S = 1_000
"""Stands in for a rate that is not known yet."""
MAX_BLOCK_NS = 1 << 30
"""A slower copy costs no more: keeps sums within 64 bits, whatever rate was measured."""
MAX_CONTEXT_PS = 1_000_000
MAX_TOKENS = 1 << 24
MAX_LOST_US = 1 << 31
MAX_ROWS = 1 << 15
"""The same for the time per context token, a row's tokens, and what is lost by rows together."""


def lost_tokens(rows: RunningRows) -> I64:
    """Tokens [R] that have to be computed again."""
    done = np.where(rows.known - rows.planned <= 1, rows.known, rows.planned)
    return np.maximum(done - rows.shared * rows.block_tokens, 0)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds [R]: of the thing itself, and lost by all rows together; -1 where it is not possible."""

    us: I64
    lost_us: I64


@dataclass(frozen=True, slots=True)
class Need:
    """Who waits for blocks that are copied away: `now` rows at once, and of `rows` one after the other, all of them
    within `all_us`."""

    now: int
    rows: int
    all_us: int

    @classmethod
    def of(cls, snapshot: Snapshot, rows: RunningRows, starving: int) -> Need:
        """By the step-time model; without one, those that starve now."""
        model, decodes = StepTime.of(snapshot.rates), int(np.count_nonzero(rows.decodes))
        step_us = model.ns(decodes, decodes, int(rows.planned[rows.decodes].sum())) // 1000
        return cls(starving, decodes if step_us else 0, max(min(step_us, MAX_LOST_US) * rows.block_tokens, 1))

    def lost_us(self, out_us: I64, at_once: I64, blocks: I64) -> I64:
        """By all of them together: `at_once` [R] blocks are free, `blocks` [R] more one by one within `out_us` [R]."""
        time_us = np.minimum(out_us, MAX_LOST_US)
        first = np.maximum(self.now - at_once, 0)
        last = self.now + self.rows * time_us // self.all_us - at_once - blocks
        first, last = np.minimum(first, MAX_ROWS), np.minimum(last, MAX_ROWS)
        served_us = first * (first + 1) * (time_us // np.maximum(2 * (first - last), 1))
        lost: I64 = np.where(last < 0, served_us, (first + np.maximum(last, 0)) * time_us // 2)
        return lost


@dataclass(frozen=True, slots=True)
class Costs:
    """`room` is left in each tier: blocks to store, blocks to pin."""

    recompute: Cost
    moves: tuple[tuple[PreemptionMode, Cost], ...]
    private: I64  # [R] blocks that come free
    store: I64  # [R] blocks to be stored
    pin: I64  # [R] blocks to be brought back
    out_ns: int  # to store a block
    room: dict[PreemptionMode, list[int]]

    @classmethod
    def of(cls, snapshot: Snapshot, rows: RunningRows, *, starving: int = 1) -> Costs:
        """By the rates measured and the room that the tiers have."""
        rates, cpu, ssd = snapshot.rates, snapshot.cpu, snapshot.ssd
        full = np.minimum(rows.planned // rows.block_tokens, rows.held)
        pin = np.maximum(full - rows.shared, 0)
        store = np.maximum(pin - rows.lower, 0)
        leaving_us = max(snapshot.blocks.leaving * out_ns(rates) // 1000, cpu.out_queue_us)
        shared = rows.shared * rows.block_tokens
        recompute_us = compute_us(snapshot, shared, shared + lost_tokens(rows))
        need, kept = Need.of(snapshot, rows, starving), _kept(store, pin)
        moves = tuple(
            (mode, _move(store, pin, rows.private - kept, rates, room, leaving_us, queue_us, need, ssd=on_ssd))
            for mode, room, queue_us, on_ssd in (
                (PreemptionMode.SWAP_CPU, cpu, cpu.queue_us, False),
                (PreemptionMode.SWAP_SSD, ssd, cpu.queue_us + ssd.queue_us, True),
            )
            if snapshot.settings.lower_tiers is not LowerTiers.NEVER
        )
        return cls(
            Cost(recompute_us, _lost(recompute_us, rows_at_once(rows))),
            moves,
            rows.private,
            store,
            pin,
            out_ns(rates),
            {
                PreemptionMode.SWAP_CPU: [cpu.free_blocks, cpu.pin_blocks],
                PreemptionMode.SWAP_SSD: [ssd.free_blocks, ssd.pin_blocks],
            },
        )

    def freed(self, victims: I64, modes: I64) -> I64:
        """Blocks [V] that are free as soon as the victims have left."""
        kept = np.where(modes == PreemptionMode.RECOMPUTE, 0, _kept(self.store[victims], self.pin[victims]))
        freed: I64 = self.private[victims] - kept
        return freed

    @property
    def least_us(self) -> I64:
        """Microseconds [R] of the way by which least is lost."""
        least, lost = self.recompute.us, self.recompute.lost_us
        for _, move in self.moves:
            better = (move.us >= 0) & (move.lost_us < lost)
            least, lost = np.where(better, move.us, least), np.where(better, move.lost_us, lost)
        return least

    @property
    def least_lost_us(self) -> I64:
        """Of the cheapest way [R]."""
        least = self.recompute.lost_us
        for _, move in self.moves:
            least = np.where(move.us >= 0, np.minimum(least, move.lost_us), least)
        return least

    def settle(self, victims: I64) -> tuple[I64, I64]:
        """The mode of each victim and the microseconds of its cheapest move, as long as the tiers have room."""
        modes, moves, wait_us = [], [], 0
        for victim in victims.tolist():
            store, pin = int(self.store[victim]), int(self.pin[victim])
            options = [
                (int(cost.lost_us[victim]), int(cost.us[victim]) + wait_us, mode)
                for mode, cost in self.moves
                if cost.us[victim] >= 0 and self.room[mode][0] >= store and self.room[mode][1] >= pin
            ]
            lost, move, mode = min(options, default=(0, -1, PreemptionMode.RECOMPUTE))
            moves.append(move)
            if lost >= int(self.recompute.lost_us[victim]):
                mode = PreemptionMode.RECOMPUTE
            if mode is not PreemptionMode.RECOMPUTE:
                self.room[mode][0] -= store
                self.room[mode][1] -= pin
                wait_us += store * self.out_ns // 1000
            modes.append(int(mode))
        return np.array(modes, np.int64), np.array(moves, np.int64)


def rows_at_once(rows: RunningRows) -> int:
    """Rows that a step keeps waiting as long as it takes: those that compute, or will."""
    return max(int(np.count_nonzero(rows.wanted)), 1)


def compute_us(snapshot: Snapshot, first: I64, last: I64) -> I64:
    """Microseconds [R] that it takes to compute the tokens of rows from index `first` [R] up to `last` [R]; ages, where
    all that can be copied is to be copied."""
    rates = snapshot.rates
    speed = rates.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S
    if snapshot.settings.lower_tiers is LowerTiers.ALWAYS:
        speed = 1  # whatever is copied comes sooner
    chunk = max(min(snapshot.settings.chunk_cap_tokens, snapshot.settings.max_step_tokens), 1)
    first, last = np.minimum(first, MAX_TOKENS), np.minimum(last, MAX_TOKENS)
    count = np.maximum(last - first, 0)
    read = count * (first + last) // (2 * chunk)  # context of each chunk, summed up
    context_us = read // 1000 * min(rates.step_per_context_token_ps, MAX_CONTEXT_PS) // 1000
    time_us: I64 = count * 1_000_000 // speed + context_us
    return time_us


def out_ns(rates: Rates) -> int:
    """Nanoseconds to store a block in the CPU tier; 0 unknown."""
    out = rates.to_host_bytes_per_s
    return min(rates.block_bytes * 1_000_000_000 // out, MAX_BLOCK_NS) if out else 0


def _kept(store: I64, pin: I64) -> I64:
    """Blocks [R] that are not free before copies have ended: one that is stored keeps those before it."""
    kept: I64 = np.where(store > 0, pin, 0)
    return kept


def _move(
    store: I64,
    pin: I64,
    at_once: I64,
    rates: Rates,
    room: TierRoom,
    leaving_us: int,
    queue_us: int,
    need: Need,
    *,
    ssd: bool = False,
) -> Cost:
    """To store [R] and to bring back [R] through the CPU tier, or through it to the SSD."""
    out_rates, in_rates = [rates.to_host_bytes_per_s], [rates.to_device_bytes_per_s]
    if ssd:
        out_rates.append(rates.ssd_write_bytes_per_s)
        in_rates.append(rates.ssd_read_bytes_per_s)
    if not rates.block_bytes or not room.pin_blocks or not all(out_rates + in_rates):
        none = np.full(len(store), -1, np.int64)
        return Cost(none, none)
    out_us, in_us = (
        wait_us
        + blocks * min(sum(rates.block_bytes * 1_000_000_000 // speed for speed in speeds), MAX_BLOCK_NS) // 1000
        for blocks, speeds, wait_us in ((store, out_rates, leaving_us), (pin, in_rates, queue_us))
    )
    fits = (store <= room.free_blocks) & (pin <= room.pin_blocks)
    lost_us = need.lost_us(out_us, at_once, _kept(store, pin)) + _lost(out_us // 2 + in_us, 1)
    return Cost(np.where(fits, out_us + in_us, -1), np.where(fits, lost_us, -1))


def _lost(time_us: I64, rows: int) -> I64:
    """By so many rows, each of which waits so long."""
    lost: I64 = np.minimum(time_us, MAX_LOST_US) * min(rows, MAX_ROWS)
    return lost


def cheapest_cover(cost: I64, gain: I64, allowed: Flags, need: int) -> I64:
    """Positions whose gains reach `need` at little cost, or all allowed ones if they cannot.

    The greedy cover by cost per block, each of its prefixes tried with the cheapest single row that completes it: at
    most twice the least cost, and the least if one row is (Csirik et al., "Heuristics for the 0-1 min-knapsack
    problem", 1991). Rows that the others make needless are dropped. Ties go against the later row.
    """
    positions = np.flatnonzero(allowed)[::-1]
    if need <= 0 or len(positions) == 0:
        return np.empty(0, np.int64)
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


def cover_by_class(cost: I64, gain: I64, allowed: Flags, need: int, classes: I64) -> I64:
    """`cheapest_cover` among the rows of the highest classes, with no lower class than reaching `need` takes."""
    allowed = allowed & (gain > 0)
    if need <= 0 or not allowed.any():
        return np.empty(0, np.int64)
    levels = classes[allowed]
    if int(levels.min()) == int(levels.max()):
        return cheapest_cover(cost, gain, allowed, need)
    order = np.argsort(-levels, kind="stable")
    reached = np.flatnonzero(np.cumsum(gain[allowed][order]) >= need)
    lowest = levels[order][reached[0]] if len(reached) else levels.min()
    return cheapest_cover(cost, gain, allowed & (classes >= lowest), need)
