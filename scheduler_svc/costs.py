"""What it costs to take a running row's blocks away and to bring them back, and the cheapest rows that free enough.

    recompute = tokens lost / prefill rate
    move      = bytes not yet lower down / rate out + bytes to bring back / rate in + wait in the copy queues

Blocks that others hold are neither freed nor lost. Tokens lost are all of prompt and answer, or what a row in its
prefill has computed: the rest of a prompt has to be computed either way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jitney.columns import I64
from jitney.decision import PreemptionMode
from jitney.snapshot import Rates, Snapshot, TierRoom
from scheduler_svc.running import Flags, RunningRows

ASSUMED_PREFILL_TOKENS_PER_S = 1_000
"""Stands in for a rate that is not known yet."""
MAX_BLOCK_NS = 1 << 30
"""A slower copy costs no more: keeps sums within 64 bits, whatever rate was measured."""


def lost_tokens(rows: RunningRows) -> I64:
    """Tokens [R] that have to be computed again."""
    done = np.where(rows.known - rows.planned <= 1, rows.known, rows.planned)
    return np.maximum(done - rows.shared * rows.block_tokens, 0)


@dataclass(frozen=True, slots=True)
class Costs:
    """[R] each; -1 where a move is not possible. `room` is left in each tier: blocks to store, blocks to pin."""

    recompute_us: I64
    cpu_us: I64
    ssd_us: I64
    store: I64  # blocks to be stored
    pin: I64  # blocks to be brought back
    room: dict[PreemptionMode, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshot: Snapshot, rows: RunningRows) -> Costs:
        """By the rates measured and the room that the tiers have."""
        rates = snapshot.rates
        speed = rates.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S
        full = np.minimum(rows.planned // rows.block_tokens, rows.held)
        pin = np.maximum(full - rows.shared, 0)
        store = np.maximum(pin - rows.lower, 0)
        cpu_us = _move_us(store, pin, rates, snapshot.cpu, ssd=False)
        ssd_us = _move_us(store, pin, rates, snapshot.ssd, ssd=True)
        ssd_us += np.where(ssd_us >= 0, snapshot.cpu.queue_us, 0)
        room = {
            PreemptionMode.SWAP_CPU: [snapshot.cpu.free_blocks, snapshot.cpu.pin_blocks],
            PreemptionMode.SWAP_SSD: [snapshot.ssd.free_blocks, snapshot.ssd.pin_blocks],
        }
        return cls(lost_tokens(rows) * 1_000_000 // speed, cpu_us, ssd_us, store, pin, room)

    @property
    def least_us(self) -> I64:
        """Of the cheapest way [R]."""
        least = self.recompute_us
        for move in (self.cpu_us, self.ssd_us):
            least = np.where(move >= 0, np.minimum(least, move), least)
        return least

    def settle(self, victims: I64) -> tuple[I64, I64]:
        """The mode of each victim and the microseconds of its cheapest move, as long as the tiers have room."""
        modes, moves = [], []
        for victim in victims.tolist():
            store, pin = int(self.store[victim]), int(self.pin[victim])
            options = [
                (int(cost[victim]), mode)
                for mode, cost in ((PreemptionMode.SWAP_CPU, self.cpu_us), (PreemptionMode.SWAP_SSD, self.ssd_us))
                if cost[victim] >= 0 and self.room[mode][0] >= store and self.room[mode][1] >= pin
            ]
            move, mode = min(options, default=(-1, PreemptionMode.RECOMPUTE))
            moves.append(move)
            if move >= self.recompute_us[victim]:
                mode = PreemptionMode.RECOMPUTE
            if mode is not PreemptionMode.RECOMPUTE:
                self.room[mode][0] -= store
                self.room[mode][1] -= pin
            modes.append(int(mode))
        return np.array(modes, np.int64), np.array(moves, np.int64)


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
