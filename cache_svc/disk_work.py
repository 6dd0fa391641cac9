"""What is under way between CPU tier and SSD, and what the SSD shall have: reads, writes, kept keys.

A key is *kept* once it belongs to a unit that the SSD shall have, until it is written or lost. As soon as its block is
in the CPU tier it waits in `queue`, parents before children, and is written when fewer than `limit` writes are open.
What is swapped to the SSD does not wait: its slot is `reserved` from the beginning, it is written once it is stored.

Single flight: a key that is read already is waited for. What is stored in the CPU tier by the time its read ends has
two slots for a while; the second is given up as soon as its readers have left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cache_svc.disk_jobs import DiskEntry, DiskHeader, DiskJob, DiskRead, DiskWrite, Job
from cache_svc.slots import BUSY, FILLING, FREE, RETIRED, Entry, SlotTable
from cache_svc.tier_usage import Moved
from jitney.keys import Key
from jitney.ticket_ops import slot_id

RESTED_AT_ONCE = 32
"""Slots that were written: to put one at its place in the order takes a walk along its chain, for many it takes one."""


class DiskWork:
    """`arrived(slot, ok)` is told of the CPU slot of every read that has ended, before the read leaves it."""

    def __init__(self, cpu: SlotTable, ssd: SlotTable, limit: int, moved: Moved, arrived: Callable[[int, bool], None]):
        self.cpu = cpu
        self.ssd = ssd
        self.limit = limit
        self.moved = moved
        self.arrived = arrived
        self.reading: dict[Key, int] = {}  # the CPU slot that is filled
        self.kept: dict[Key, bool] = {}  # whether a hit may end behind it
        self.queue: dict[Key, None] = {}
        self.reserved: dict[Key, int] = {}  # SSD slots of what is to be written
        self.writing: dict[Key, int] = {}  # and of what is written now
        self.jobs: dict[Job, DiskRead | DiskWrite] = {}
        self.written_slots: list[int] = []
        self.named = [False] * ssd.total  # SSD slots whose header on the disk says something, as far as is known
        self.unerased: dict[int, None] = {}  # slots that the disk would not have erased: to be tried again
        self._new: list[DiskJob] = []
        self._last_job = 0

    def has(self, key: Key) -> bool:
        """Whether the SSD has the key, or a slot for it."""
        return key in self.ssd.index.sealed or key in self.writing or key in self.reserved

    def take_jobs(self) -> list[DiskJob]:
        """New work, what somebody waits for first."""
        jobs, self._new = self._new, []
        jobs.sort(key=lambda job: not (isinstance(job, DiskRead) and job.urgent))
        return jobs

    # Up.

    def read(self, key: Key, *, urgent: bool) -> int | None:
        """The CPU slot that the key of the SSD is read into, now or already; None if there is none to be had."""
        slot = self.reading.get(key)
        if slot is not None:
            if urgent:
                self._hurry(slot)
            return slot
        ssd_slot = self.ssd.find(key)
        assert ssd_slot is not None
        entry = self.ssd.entry_of(ssd_slot)
        slot = self.cpu.take(entry)
        if slot is None:
            return None
        self.ssd.use(ssd_slot)
        self.reading[key] = slot
        described = self._described(entry, self.ssd.checksum[ssd_slot], self.ssd.place[ssd_slot])
        job = DiskRead(self._number(), ssd_slot, self.cpu.handle(slot), described, urgent)
        self.jobs[job.job] = job
        self._new.append(job)
        return slot

    def _hurry(self, slot: int) -> None:
        for at, job in enumerate(self._new):
            if isinstance(job, DiskRead) and slot_id(job.cpu_slot) == slot:
                self._new[at] = self.jobs[job.job] = replace(job, urgent=True)

    def read_ended(self, job: Job, *, ok: bool) -> None:
        """A read is done. Of a bad one, the entry and what stands behind it go."""
        read = self.jobs.get(job)
        if not isinstance(read, DiskRead):
            return
        del self.jobs[job]
        key, slot, ssd_slot = read.entry.key, slot_id(read.cpu_slot), read.disk_slot
        if self.reading.get(key) == slot:
            del self.reading[key]
        if ok:
            self.moved.loads += 1
        elif self.ssd.state[ssd_slot] is BUSY:
            self.moved.bad += 1
            self.moved.dropped += len(self.forget(self.ssd.index.behind((ssd_slot,)))) - 1
        self.ssd.leave(ssd_slot)
        if self.cpu.state[slot] is FILLING:
            if ok and self.cpu.find(key) is None:
                self.cpu.store(slot, read.entry.checksum)
                self.stored(key)
            else:
                self.cpu.checksum[slot] = read.entry.checksum  # who waits for it reads it here all the same
                self.cpu.retire(slot)
            self.arrived(slot, ok)
        self.cpu.leave(slot)

    def erase_free(self) -> None:
        """A restart shall not find what was evicted, or what a scan came upon in vain: of free slots it is not known
        what their headers say."""
        for slot in self.ssd.free:
            if self.named[slot]:
                self.erase(slot)

    def erase_again(self, most: int) -> None:
        """Tries so many slots once more. What was written there since has another header."""
        slots = list(self.unerased)[:most]
        for slot in slots:
            if self.ssd.state[slot] is FILLING:
                continue  # if what it is to hold does not come, it is free again
            del self.unerased[slot]
            if self.ssd.state[slot] in (FREE, RETIRED):
                self.erase(slot)

    def forget(self, doomed: set[int]) -> list[int]:
        """Removes stored SSD slots, in which all that stand behind one must be, from the disk too."""
        gone = self.ssd.remove(doomed)
        for slot in gone:
            self.erase(slot)
        return gone

    def cancel(self, key: Key) -> None:
        """What is on its way to the SSD under this key, or shall be, is of no use any more."""
        self.kept.pop(key, None)
        self.queue.pop(key, None)
        self.give_up(key)
        slot = self.writing.pop(key, None)
        if slot is not None:
            self.ssd.retire(slot)

    # Down.

    def keep(self, key: Key, *, place: bool) -> None:
        """The SSD shall have the key."""
        slot = self.ssd.find(key)
        if slot is not None:
            if place and not self.ssd.place[slot]:
                self._place(slot)
        else:
            self.kept[key] = self.kept.get(key, False) or place
            if self.cpu.find(key) is not None and key not in self.writing:
                self.queue[key] = None

    def _place(self, slot: int) -> None:
        """A hit may end behind this stored slot, which its header does not say yet."""
        self.ssd.place[slot] = True
        described = self._described(self.ssd.entry_of(slot), self.ssd.checksum[slot], True)
        self._new.append(DiskHeader(self._number(), slot, described))

    def reserve(self, entry: Entry) -> bool:
        """A slot for a key that is written as soon as it is in the CPU tier; False if there is none."""
        slot = self.ssd.take(entry)
        if slot is None:
            return False
        self.reserved[entry.key] = slot
        self.kept.setdefault(entry.key, False)
        cpu_slot = self.cpu.find(entry.key)
        if cpu_slot is not None:
            self._write(entry.key, cpu_slot)
        return True

    def give_up(self, key: Key) -> None:
        """What was reserved for the key is free again, unless it is being written."""
        slot = self.reserved.pop(key, None)
        if slot is not None:
            self.kept.pop(key, None)
            self.ssd.retire(slot)
            self.ssd.leave(slot)

    def stored(self, key: Key) -> None:
        """The key is in the CPU tier now."""
        slot = self.cpu.find(key)
        assert slot is not None
        if key in self.reserved:
            self._write(key, slot)
        elif key in self.kept and key not in self.writing:
            self.queue[key] = None

    def lost(self, key: Key) -> None:
        """The key's block will not be stored in the CPU tier, or was evicted from it."""
        self.queue.pop(key, None)
        if key not in self.writing and self.kept.pop(key, None) is not None:
            self.moved.dropped += 1
        self.give_up(key)

    def pump(self) -> None:
        """Orders the writes that there is room for."""
        while self.queue and len(self.writing) < self.limit:
            key = next(iter(self.queue))
            del self.queue[key]
            slot = self.cpu.find(key)
            assert slot is not None
            if self.ssd.find(key) is not None:
                self.keep(key, place=self.kept.pop(key))
                continue
            ssd_slot = self.ssd.take(self.cpu.entry_of(slot))
            if ssd_slot is None:
                self.lost(key)
            else:
                self.reserved[key] = ssd_slot
                self._write(key, slot)
        if len(self.written_slots) >= RESTED_AT_ONCE or not self.writing:
            for slot in reversed(self.written_slots):
                self.ssd.leave(slot)
            self.written_slots.clear()

    def _write(self, key: Key, slot: int) -> None:
        self.queue.pop(key, None)
        ssd_slot = self.writing[key] = self.reserved.pop(key)
        self.named[ssd_slot] = True
        self.cpu.use(slot)
        described = self._described(self.cpu.entry_of(slot), self.cpu.checksum[slot], self.kept.get(key, False))
        job = DiskWrite(self._number(), self.cpu.handle(slot), ssd_slot, described)
        self.jobs[job.job] = job
        self._new.append(job)

    def write_ended(self, job: Job, *, ok: bool) -> None:
        """A write is done."""
        write = self.jobs.get(job)
        if not isinstance(write, DiskWrite):
            return
        del self.jobs[job]
        key, ssd_slot = write.entry.key, write.disk_slot
        self.cpu.leave(slot_id(write.cpu_slot))
        if self.ssd.state[ssd_slot] is RETIRED:
            self.erase(ssd_slot)
            self.ssd.leave(ssd_slot)
            return
        del self.writing[key]
        place = self.kept.pop(key, False)
        if ok:
            self.moved.stores += 1
            self.ssd.store(ssd_slot, write.entry.checksum)
            self.ssd.place[ssd_slot] = write.entry.place
            if place and not write.entry.place:
                self._place(ssd_slot)
            self.written_slots.append(ssd_slot)
        else:
            self.moved.dropped += 1
            self.unerased[ssd_slot] = None  # what stood there before may be forgotten by now
            self.ssd.retire(ssd_slot)
            self.ssd.leave(ssd_slot)

    def found(self, slot: int, entry: DiskEntry) -> bool:
        """What the header of a slot says that was written before this start; whether it counts."""
        self.named[slot] = True
        plain = Entry(entry.key, entry.parent, entry.content, entry.fingerprint)
        if self.has(entry.key) or not self.ssd.take_this(slot, plain):
            return False
        self.kept.pop(entry.key, None)
        self.queue.pop(entry.key, None)
        self.ssd.store(slot, entry.checksum)
        self.ssd.place[slot] = entry.place
        self.ssd.leave(slot)
        return True

    def _described(self, entry: Entry, checksum: int, place: bool) -> DiskEntry:
        return DiskEntry(entry.key, entry.parent, entry.content, entry.fingerprint, checksum, place)

    def erase(self, slot: int) -> None:
        """A restart shall not find what stands in the slot."""
        self.named[slot] = False
        self._new.append(DiskHeader(self._number(), slot, None))

    def _number(self) -> Job:
        self._last_job += 1
        return Job(self._last_job)
