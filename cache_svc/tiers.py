"""The lower tiers of one cache process: CPU tier and SSD, shared by the ledgers of all executors.

Pure: no clock, no input and output. Who runs it sets `now_us`, passes on what executors and disk say, calls `pump`, and
carries out what `take_generations`, `take_jobs` and `take_events` give, in this order: the generation of a slot has to
be in the segment before anybody knows of the slot.
"""

from __future__ import annotations

from cache_svc.below import Below, Filling, room
from cache_svc.blocks import BlockTable
from cache_svc.disk_jobs import DiskEntry, DiskJob, Job
from cache_svc.eviction import EvictionOrder, OrderOf
from cache_svc.index import Index, Origin
from cache_svc.loads import Loads, Waiting, lose_all, lose_removed
from cache_svc.lower import Lower, TierLimits
from cache_svc.pins import Owner, Swapped
from cache_svc.slots import FREE, SlotTable
from cache_svc.tickets import Load
from cache_svc.tier_usage import Moved, TierUsage, Usage
from jitney.block_ops import Room
from jitney.errors import Missing
from jitney.keys import Key
from jitney.ticket_ops import TicketCall, TicketEvent

__all__ = ["Owner", "TierLimits", "Tiers"]


class Tiers:
    """`belows` has an entry for each epoch that may still touch a slot."""

    def __init__(
        self,
        limits: TierLimits,
        *,
        eviction: OrderOf = EvictionOrder,
        cpu_index: Index | None = None,
        ssd_index: Index | None = None,
    ) -> None:
        """The indexes of the tiers may be given by who watches them; they are empty, with an entry a slot."""
        self.limits = limits
        self.lower = Lower(limits, eviction, self._arrived, self._swap_over, cpu_index, ssd_index)
        self.waiting: Waiting = {}
        self.filling: Filling = {}
        self.belows: dict[Owner, Below] = {}

    @property
    def now_us(self) -> int:
        """The caller's monotonic clock, as of its last look at it."""
        return self.lower.now_us

    @now_us.setter
    def now_us(self, now_us: int) -> None:
        self.lower.now_us = now_us

    def attach(self, owner: Owner, table: BlockTable, fingerprint: bytes) -> Below:
        """What lies below this device. A second table of an epoch takes the place of a first that was never used."""
        below = self.belows[owner] = Below(self.lower, self.waiting, self.filling, owner, table, fingerprint)
        return below

    def told(self, owner: Owner, call: TicketCall) -> None:
        """What an executor says of a ticket, or wants to be read ahead.

        Missing for a ticket that it was never given, InvalidRequest for an answer that cannot be; what is said of a
        ticket that has ended changes nothing.
        """
        below = self.belows.get(owner)
        if below is None:
            raise Missing(f"epoch {owner[1]} of {owner[0]!r} has no tickets", field="executor", value=owner[0])
        self.lower.pins.expire(self.now_us)
        if below.told(call):
            self._lose_removed()
        self.pump()
        if not below.fenced:
            below.stores.tend()
        self._forget_fenced()

    def pump(self) -> None:
        """After whatever may have made room, for anybody: what waits to be written, whose queue bounds the stores, then
        those."""
        self.lower.disk.pump()
        for below in self.belows.values():
            if not below.fenced:
                below.stores.pump()

    def take_generations(self) -> list[tuple[int, int]]:
        """CPU slots that were given anew, and their generations. Those of the SSD are nobody's business."""
        cpu = self.lower.cpu
        given, cpu.given = cpu.given, []
        self.lower.ssd.given.clear()
        return [(slot, cpu.generation[slot]) for slot in given]

    def take_events(self, owner: Owner) -> list[TicketEvent]:
        """What is new for the executor, in order."""
        below = self.belows.get(owner)
        return below.tickets.take_events() if below is not None else []

    def open_events(self, owner: Owner) -> list[TicketEvent]:
        """All that is open, for an executor that opens its stream anew. What is new is in it, and is not told again."""
        below = self.belows.get(owner)
        return below.open_events() if below is not None and not below.fenced else []

    def take_jobs(self) -> list[DiskJob]:
        """New work for the disk, urgent reads first. Those of one slot have to be done in the order given."""
        return self.lower.disk.take_jobs()

    def written(self, job: Job, *, ok: bool) -> None:
        """A write is done, or failed and is lost. Reports of jobs that are not open are ignored."""
        self.lower.disk.write_ended(job, ok=ok)

    def read(self, job: Job, *, ok: bool) -> None:
        """A read is done. Not `ok`: what stands there is not the entry, or it cannot be read."""
        self.lower.disk.read_ended(job, ok=ok)

    def found(self, disk_slot: int, entry: DiskEntry) -> None:
        """A scan of the disk came upon an entry. It counts unless slot or key are in use by now."""
        if 0 <= disk_slot < self.lower.ssd.total:
            self.lower.disk.found(disk_slot, entry)

    def erase(self, disk_slot: int) -> None:
        """What a scan came upon there is not wanted. A slot that is in use by now has something else."""
        ssd = self.lower.ssd
        if 0 <= disk_slot < ssd.total and ssd.state[disk_slot] is FREE:
            self.lower.disk.erase(disk_slot)

    def unerased(self, disk_slot: int) -> None:
        """The disk would not have it erased: it is tried again."""
        self.lower.disk.unerased[disk_slot] = None

    def erase_again(self, most: int) -> None:
        """Tries so many of those."""
        self.lower.disk.erase_again(most)

    def fence(self, owner: Owner) -> None:
        """The epoch is over, but its process may still copy: the slots of its open stores stay taken."""
        below = self.belows.get(owner)
        if below is not None:
            below.fence()
            self._forget_fenced()

    def gone(self, owner: Owner) -> None:
        """The process is gone: the slots of its open stores are free."""
        below = self.belows.get(owner)
        if below is not None:
            below.gone()
            self._forget_fenced()

    def retired(self) -> list[Owner]:
        """Fenced epochs whose processes have not answered all that they were asked to copy."""
        return [owner for owner, below in self.belows.items() if below.fenced]

    def room(self) -> tuple[Room, Room]:
        """Of CPU tier and SSD."""
        return room(self.lower)

    def usage(self) -> Usage:
        """What the tiers hold and did."""
        lower = self.lower
        return Usage(_usage(lower.cpu, lower.cpu_moved), _usage(lower.ssd, lower.ssd_moved), lower.unstored)

    def on_the_way(self) -> list[tuple[Key, Key, Origin]]:
        """Key, parent key and origin of what is being copied into slots."""
        lower = self.lower
        slots = [(lower.cpu, slot) for keys in (lower.storing, lower.disk.reading) for slot in keys.values()]
        slots += [(lower.ssd, slot) for keys in (lower.disk.reserved, lower.disk.writing) for slot in keys.values()]
        entries = [table.entry_of(slot) for table, slot in slots]
        return [(entry.key, entry.parent, entry.content.origin) for entry in entries]

    def forget(self, doomed: set[Key]) -> tuple[int, int]:
        """Content that nobody may find any more, with all that stands behind it: how many slots of CPU tier and SSD
        had it."""
        lower, disk = self.lower, self.lower.disk
        coming = [lower.storing.pop(key) for key in doomed if key in lower.storing]
        coming += [disk.reading.pop(key) for key in doomed if key in disk.reading]
        for slot in coming:
            lower.cpu.retire(slot)
        for key in doomed:
            disk.cancel(key)
        stored = [
            {table.index.sealed[key] for key in doomed if key in table.index.sealed} for table in (lower.cpu, lower.ssd)
        ]
        cpu, ssd = lower.cpu.remove(stored[0]), disk.forget(stored[1])
        disk.erase_free()
        for slot in coming:
            lose_all(self.waiting, slot)
        self._lose_removed()
        return len(cpu), len(ssd)

    def open_loads(self) -> list[tuple[Loads, Load]]:
        """Of all executors."""
        return [
            (below.loads, ticket)
            for below in self.belows.values()
            for ticket in list(below.tickets.open.values())
            if isinstance(ticket, Load)
        ]

    def _arrived(self, slot: int, ok: bool) -> None:
        if ok:
            for loads, load, at in self.waiting.pop(slot, ()):
                loads.arrived(load, at)
        else:
            lose_all(self.waiting, slot)
            self._lose_removed()

    def _lose_removed(self) -> None:
        lose_removed(self.open_loads(), self.lower.cpu.state)

    def _swap_over(self, swapped: Swapped) -> None:
        below = self.belows.get(swapped[0])
        if below is not None:
            below.swap_over()

    def _forget_fenced(self) -> None:
        for owner in self.retired():
            if not self.belows[owner].tickets.open:
                del self.belows[owner]


def _usage(table: SlotTable, moved: Moved) -> TierUsage:
    return TierUsage(
        table.total,
        table.used,
        len(table.pinned),
        table.retired,
        table.evicted,
        moved,
        dict(table.tenants),
    )
