"""What copies and recomputes were seen to take, beside what was reckoned: rates that are wrong correct themselves.

A rate is measured for what it is the rate of; what a preemption takes is more: a copy queues, shares its way, and a
rate of a while ago may not be that of now. So of what a decision begins (a load, a swap, a
computation of some length) the time reckoned by the snapshot's rates is kept until a later snapshot shows that it has
ended, and the ratio of seen to reckoned, the newer ones weighing more, corrects the rates by which costs are compared.

A way that is not chosen is not seen. Therefore, when a swap was not seen for TRY_AFTER_US, one is tried that would by
the rates cost less than TRY_PERCENT of a recompute. Without a tier to copy to nothing is kept.

Kept in the policy's memory, under SECTION: <4 x (u32 seen us, u32 reckoned us, i64 last seen)>, then for each that is
open <u8 way, u8 begun, u64 request, i64 since, u32 reckoned us>; little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from jitney.columns import RunningTable
from jitney.decision import PreemptionMode
from jitney.snapshot import Snapshot
from scheduler_svc.admission import Boarding
from scheduler_svc.costs import Costs
from scheduler_svc.loading import LoadCosts
from scheduler_svc.preemption import Relief
from scheduler_svc.running import RunningRows
from scheduler_svc.step_time import StepTime

SECTION = "costs"
VERSION = 1
KEPT_PERMILLE = 750
"""Of what was seen before, with each new outcome."""
MAX_OPEN = 16
MAX_RATIO = 4
MOST_US = 1 << 30
LEAST_US = 2_000
"""Shorter ones teach nothing: they end within a step anyway."""
TRY_AFTER_US = 20_000_000
TRY_PERCENT = 300
_WAY = struct.Struct("<IIq")
_OPEN = struct.Struct("<BBQqI")


class Way(IntEnum):
    """What takes time. Reads of the SSD have the copy into the device in them."""

    COMPUTE = 0
    OUT = 1
    INTO = 2
    READ = 3


@dataclass(slots=True)
class Seen:
    """Decayed sums."""

    seen_us: int = 0
    reckoned_us: int = 0
    last_us: int = 0

    def corrected(self, rate: int) -> int:
        """The rate at which what was reckoned takes as long as it was seen to take."""
        if not rate or not self.seen_us or not self.reckoned_us:
            return rate
        ratio = self.reckoned_us / self.seen_us
        return max(int(rate * min(max(ratio, 1 / MAX_RATIO), MAX_RATIO)), 1)


@dataclass(slots=True)
class Open:
    """Something that was begun. `begun`: a snapshot has shown it under way."""

    way: Way
    begun: bool
    request: int
    since_us: int
    reckoned_us: int


@dataclass(slots=True)
class Outcomes:
    """Read at the start of a decision, written at its end. `tiers`: there is somewhere to copy to."""

    ways: list[Seen] = field(default_factory=lambda: [Seen() for _ in Way])
    open: list[Open] = field(default_factory=list)
    now_us: int = 0
    tiers: bool = False

    @classmethod
    def read(cls, content: bytes) -> Outcomes:
        """Empty if the content is not what `write` gives."""
        head = _WAY.size * len(Way)
        if len(content) < head or (len(content) - head) % _OPEN.size:
            return cls()
        kinds = [row for row in _OPEN.iter_unpack(content[head:]) if row[0] < len(Way)]
        return cls(
            [Seen(*row) for row in _WAY.iter_unpack(content[:head])],
            [Open(Way(way), bool(begun), request, since, us) for way, begun, request, since, us in kinds],
        )

    def write(self) -> bytes:
        """For the policy's memory."""
        if not self.tiers:
            return b""
        ways = [_WAY.pack(min(w.seen_us, MOST_US), min(w.reckoned_us, MOST_US), w.last_us) for w in self.ways]
        return b"".join([*ways, *(_OPEN.pack(o.way, o.begun, o.request, o.since_us, o.reckoned_us) for o in self.open)])

    @classmethod
    def of(cls, snapshot: Snapshot, content: bytes) -> Outcomes:
        """What is remembered, with what the snapshot shows to have ended."""
        now_us, tiers = snapshot.now_us, snapshot.cpu.pin_blocks + snapshot.ssd.pin_blocks > 0
        if not content:
            return cls([Seen(last_us=now_us) for _ in Way], now_us=now_us, tiers=tiers)
        outcomes = cls.read(content)
        outcomes.now_us, outcomes.tiers = now_us, tiers or bool(outcomes.open)
        rows = {id_: row for row, id_ in enumerate(snapshot.running.id.tolist())} if outcomes.open else {}
        outcomes.open = [one for one in outcomes.open if not outcomes._ended(one, snapshot, rows.get(one.request))]
        return outcomes

    def _ended(self, one: Open, snapshot: Snapshot, row: int | None) -> bool:
        """Whether there is nothing more to see of it; if it came to its end, that was seen."""
        now_us, table, leaving = snapshot.now_us, snapshot.running, snapshot.blocks.leaving > 0
        if one.way is Way.OUT:
            over = not leaving and (one.begun or now_us - one.since_us > 2 * one.reckoned_us)
            if over:
                self._add(one, now_us if one.begun else one.since_us + one.reckoned_us, now_us)
            one.begun = one.begun or leaving
            return over
        if row is None:
            return True
        if _under_way(one.way, table, row):
            one.begun = True
            return False
        self._add(one, now_us, now_us)
        return True

    def _add(self, one: Open, ended_us: int, now_us: int) -> None:
        way = self.ways[one.way]
        way.seen_us = way.seen_us * KEPT_PERMILLE // 1000 + max(min(ended_us - one.since_us, MOST_US), 1)
        way.reckoned_us = way.reckoned_us * KEPT_PERMILLE // 1000 + one.reckoned_us
        way.last_us = now_us

    def corrected(self, snapshot: Snapshot) -> Snapshot:
        """With the rates by which costs are compared."""
        if not any(way.reckoned_us for way in self.ways):
            return snapshot
        rates, (compute, out, into, read) = snapshot.rates, self.ways
        better = replace(
            rates,
            prefill_tokens_per_s=compute.corrected(rates.prefill_tokens_per_s),
            to_host_bytes_per_s=out.corrected(rates.to_host_bytes_per_s),
            to_device_bytes_per_s=into.corrected(rates.to_device_bytes_per_s),
            ssd_read_bytes_per_s=read.corrected(rates.ssd_read_bytes_per_s),
        )
        return replace(snapshot, rates=better)

    @property
    def swap_percent(self) -> int:
        """A swap may cost so much of a recompute: more where one is to be tried."""
        return TRY_PERCENT if self._untried(Way.OUT) or self._untried(Way.INTO) else 100

    @property
    def load_percent(self) -> int:
        """The same of a load."""
        return TRY_PERCENT if self._untried(Way.INTO) else 100

    def _untried(self, way: Way) -> bool:
        under_way = any(one.way is not Way.COMPUTE for one in self.open)
        return not under_way and self.now_us - self.ways[way].last_us >= TRY_AFTER_US

    def begin(self, snapshot: Snapshot, rows: RunningRows, relief: Relief, boarding: Boarding) -> None:
        """What a decision lets begin, reckoned by the snapshot's own rates. Nothing, where there is no lower tier."""
        if not self.tiers:
            return
        swapped = relief.victims[relief.modes != PreemptionMode.RECOMPUTE]
        if len(swapped):
            costs = Costs.of(snapshot, rows)
            self._begin(Way.OUT, 0, int(costs.store[swapped].sum()) * costs.out_ns // 1000)
        rates, loads = snapshot.rates, LoadCosts.of(snapshot)
        decodes = int(np.count_nonzero(rows.decodes))
        step_us = StepTime.of(rates).ns(decodes, decodes, int(rows.planned[rows.decodes].sum())) // 1000
        size = snapshot.settings.block_tokens
        for row, load, wanted in zip(boarding.rows, boarding.loads, boarding.wanted, strict=True):
            request = int(snapshot.waiting.id[row])
            if load.blocks and not load.found:
                continue
            if load.blocks:
                way = Way.READ if load.ssd else Way.INTO
                known = rates.ssd_read_bytes_per_s if load.ssd else rates.to_device_bytes_per_s
                if known:  # a rate that is only assumed is not to be corrected
                    self._begin(way, request, loads.load_us(load.blocks, load.ssd), step_us)
            elif wanted and rates.prefill_tokens_per_s:
                there = int(snapshot.waiting.tokens[row]) - wanted
                steps = 1 - (-wanted // max(snapshot.settings.chunk_cap_tokens, 1))
                self._begin(Way.COMPUTE, request, loads.compute_us(there // size, wanted // size), steps * step_us)

    def _begin(self, way: Way, request: int, reckoned_us: int, steps_us: int = 0) -> None:
        """What takes no time to speak of is left out, and what comes when many are open. `steps_us`: time of steps that
        goes by anyhow, and is no part of what was reckoned."""
        if reckoned_us < LEAST_US or reckoned_us >= MOST_US:
            self.ways[way].last_us = self.now_us
            return
        for one in self.open:
            if way is Way.OUT and one.way is way:  # it queues behind: both end together
                one.reckoned_us = min(one.reckoned_us + reckoned_us, MOST_US)
                return
        if len(self.open) < MAX_OPEN and all(one.request != request for one in self.open):
            self.open.append(Open(way, False, request, self.now_us + min(steps_us, MOST_US), reckoned_us))


def _under_way(way: Way, table: RunningTable, row: int) -> bool:
    if way is Way.COMPUTE:
        length = int(table.prompt_tokens[row]) + int(table.generated_tokens[row])
        return int(table.computed_tokens[row]) < length - 1
    return bool(table.loading[row])
