"""A modelled SSD behind the cache: one queue, urgent reads first, with rates, delays and faults. What is on it stays
when the cache is started anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cache_svc.disk_jobs import DiskEntry, DiskHeader, DiskJob, DiskRead, DiskWrite
from jitney.columns import U64
from simulator.clock import VirtualClock
from simulator.slots import POISON, Slots, Transfer
from simulator.tiers import TierModel

Report = Callable[[DiskJob, bool], None]


def never_fails(_: DiskJob) -> bool:
    """All is well."""
    return False


@dataclass(frozen=True, slots=True)
class _Queued:
    job: DiskJob
    tier: Slots
    report: Report


class VirtualDisk:
    """Slots with a header each. `fails` says of a job whether it goes wrong."""

    def __init__(self, clock: VirtualClock, model: TierModel, block_tokens: int) -> None:
        slots = model.limits.ssd_slots
        self._clock, self._block_bytes = clock, model.block_bytes
        self.write, self.read = model.write, model.read
        self.fails: Callable[[DiskJob], bool] = never_fails
        self.content: U64 = np.full((slots, block_tokens), POISON, np.uint64)
        self.headers: dict[int, DiskEntry] = {}
        self._queue: list[_Queued] = []
        self._boots = 0
        self._busy = False
        self.written_blocks = self.read_blocks = 0

    @property
    def busy(self) -> bool:
        """Whether anything is to be done."""
        return self._busy

    def put(self, job: DiskJob, tier: Slots, report: Report) -> None:
        """Does it when its turn comes, and tells `report` whether it went well."""
        self._queue.append(_Queued(job, tier, report))
        if not self._busy:
            self._next()

    def abandon(self) -> None:
        """The cache is gone: what was queued is forgotten, what is under way is torn."""
        self._queue.clear()
        self._boots += 1

    def _next(self) -> None:
        self._busy = bool(self._queue)
        if self._busy:
            self._run(self._queue.pop(self._first()))

    def _first(self) -> int:
        """The first urgent read that has to wait for no other job of its slot, else the first job."""
        seen: set[int] = set()
        for place, queued in enumerate(self._queue):
            job = queued.job
            if isinstance(job, DiskRead) and job.urgent and job.disk_slot not in seen:
                return place
            seen.add(job.disk_slot)
        return 0

    def _run(self, queued: _Queued) -> None:
        job, tier = queued.job, queued.tier
        if isinstance(job, DiskHeader):
            self.headers.pop(job.disk_slot, None)
            if job.entry is not None:
                self.headers[job.disk_slot] = job.entry
            self._next()
            return
        failed, boots = self.fails(job), self._boots
        on_disk, in_memory = self.content[job.disk_slot], tier.block(job.cpu_slot)
        writes = isinstance(job, DiskWrite)
        if writes:
            self.headers.pop(job.disk_slot, None)
        transfer = Transfer(in_memory, on_disk) if writes else Transfer(on_disk, in_memory)
        link = self.write if writes else self.read
        took_us = link.took_us(self._block_bytes)

        def end() -> None:
            checksum = transfer.end()
            link.learn(self._block_bytes, took_us)
            good = not failed
            if writes:
                self.written_blocks += 1
                if good and boots == self._boots:
                    self.headers[job.disk_slot] = job.entry
            else:
                self.read_blocks += 1
                good = good and self.headers.get(job.disk_slot) == job.entry and checksum == job.entry.checksum
            if boots == self._boots:
                queued.report(job, good)
            self._next()

        self._clock.after(took_us, end)
