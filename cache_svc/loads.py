"""Loads of one executor: what is below its device of a chain, and the open tickets that bring it up.

All slots that a load reads are used from the moment it is opened. What stands in the CPU tier is offered at once, what
is on the SSD when it was read into a CPU slot; always in the order of the chain. A block that does not come ends the
load there: `lose`.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_svc.blocks import BlockTable
from cache_svc.lower import Lower
from cache_svc.slots import RETIRED
from cache_svc.tickets import Load, Tickets, handles
from jitney.block_ops import RequestId
from jitney.errors import InvalidRequest
from jitney.keys import Key
from jitney.ticket_ops import LoadReady, TicketLost

Waiting = dict[int, list[tuple["Loads", Load, int]]]
"""By CPU slot that is being read into: the loads that wait for it, and the index of the block in their tickets."""


class Loads:
    """`waiting` is shared by all executors."""

    def __init__(self, lower: Lower, waiting: Waiting, table: BlockTable, tickets: Tickets) -> None:
        self.lower = lower
        self.waiting = waiting
        self.table = table
        self.tickets = tickets

    def run(self, keys: Sequence[Key]) -> list[bool]:
        """The run of blocks at the start of `keys` that can be loaded; True: from the CPU tier.

        It ends behind a block of the CPU tier, or at a kept place of the SSD; no more are read from the SSD than there
        are CPU slots.
        """
        cpu, ssd = self.lower.cpu.index.sealed, self.lower.ssd
        place, left = ssd.place, self.lower.cpu.total
        found: list[bool] = []
        end = 0
        for key in keys:
            if key in cpu:
                found.append(True)
                end = len(found)
                continue
            slot = ssd.index.sealed.get(key)
            left -= 1
            if slot is None or left < 0:
                break
            found.append(False)
            if place[slot]:
                end = len(found)
        return found[:end]

    def open(self, request: RequestId, keys: Sequence[Key], blocks: Sequence[int], most: int) -> Load | None:
        """Begins to load the first of these keys, at most `most`, into the device blocks at their index."""
        run = self.run(keys)
        cpu_skipped = sum(run[most:])
        self.lower.cpu_moved.skipped += cpu_skipped
        self.lower.ssd_moved.skipped += len(run[most:]) - cpu_skipped
        run = run[:most]
        cpu, disk = self.lower.cpu, self.lower.disk
        held = {}
        for at, in_cpu in enumerate(run):
            if in_cpu:
                held[at] = cpu.index.sealed[keys[at]]
                cpu.use(held[at])
        slots: list[int] = []
        for at, in_cpu in enumerate(run):
            slot = held[at] if in_cpu else disk.read(keys[at], urgent=True)
            if slot is None:
                break
            if not in_cpu:
                cpu.use(slot)
            slots.append(slot)
        for at in reversed([at for at in held if at >= len(slots)]):
            cpu.leave(held[at])
        self.lower.ssd_moved.skipped += len(run) - len(slots)
        if not slots:
            return None
        count = len(slots)
        load = Load(
            self.tickets.number(),
            request,
            list(keys[:count]),
            list(blocks[:count]),
            slots,
            list(run[:count]),
            [not in_cpu for in_cpu in run[:count]],
            count,
        )
        self.tickets.open[load.ticket] = load
        for at, slot in enumerate(slots):
            if not load.ready[at]:
                self.waiting.setdefault(slot, []).append((self, load, at))
        self.table.pin(load.targets)
        self._offer(load)
        return load

    def arrived(self, load: Load, at: int) -> None:
        """The load's block `at` was read from the SSD."""
        load.ready[at] = True
        self._offer(load)

    def lose(self, load: Load, first: int) -> None:
        """What the load has from index `first` on does not come. Nothing of it was offered."""
        if first >= load.end:
            return
        assert load.offered <= first
        self._leave(load, first)
        load.end = first
        self.tickets.events.append(TicketLost(load.ticket, first))

    def done(self, load: Load, good_blocks: int) -> int | None:
        """The executor has copied what it could. Returns the slot of a bad entry, if there was one.

        InvalidRequest if it says that more was good than it was offered.
        """
        if not 0 <= good_blocks <= load.offered:
            raise InvalidRequest(
                f"{good_blocks} blocks of ticket {load.ticket} are good, {load.offered} were offered",
                field="good_blocks",
                limit=load.offered,
                value=good_blocks,
            )
        ssd_blocks = sum(load.from_ssd[:good_blocks])
        self.lower.cpu_moved.hits += good_blocks - ssd_blocks
        self.lower.cpu_moved.loads += good_blocks
        self.lower.ssd_moved.hits += ssd_blocks
        return load.slots[good_blocks] if good_blocks < load.offered else None

    def end(self, load: Load) -> None:
        """The ticket has ended: slots and device blocks are let go."""
        self._leave(load, 0)
        self.table.unpin(reversed(load.targets))
        del self.tickets.open[load.ticket]

    def again(self, load: Load) -> list[LoadReady | TicketLost]:
        """What the executor was told of the load."""
        told: list[LoadReady | TicketLost] = []
        if load.offered:
            told.append(self._ready(load, 0, load.offered))
        if load.end < len(load.keys):
            told.append(TicketLost(load.ticket, load.end))
        return told

    def _offer(self, load: Load) -> None:
        """Tells the executor of the next blocks that are ready."""
        end = load.offered
        while end < load.end and load.ready[end]:
            end += 1
        if end > load.offered:
            self.tickets.events.append(self._ready(load, load.offered, end))
            load.offered = end

    def _ready(self, load: Load, first: int, end: int) -> LoadReady:
        cpu, slots = self.lower.cpu, load.slots[first:end]
        checksums = [cpu.checksum[slot] for slot in slots]
        return LoadReady(load.ticket, load.request, first, handles(slots, cpu.generation), checksums)

    def _leave(self, load: Load, first: int) -> None:
        """Lets go of the slots from index `first` on."""
        for at in range(load.end - 1, first - 1, -1):
            slot = load.slots[at]
            if not load.ready[at]:
                others = [each for each in self.waiting[slot] if each[1] is not load]
                if others:
                    self.waiting[slot] = others
                else:
                    del self.waiting[slot]
            self.lower.cpu.leave(slot)


def lose_all(waiting: Waiting, slot: int) -> None:
    """A read has failed: the loads that wait for it end before it."""
    for loads, load, at in list(waiting.get(slot, ())):
        loads.lose(load, at)


def lose_removed(open_loads: Sequence[tuple[Loads, Load]], cpu_states: Sequence[object]) -> None:
    """Slots were retired while loads use them: what was not offered yet is not offered any more."""
    for loads, load in open_loads:
        for at in range(load.offered, load.end):
            if load.ready[at] and cpu_states[load.slots[at]] is RETIRED:
                loads.lose(load, at)
                break
