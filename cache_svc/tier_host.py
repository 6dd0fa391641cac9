"""The lower tiers of this process put together: state machine, bytes, threads, streams, and whose process lives.

Everything here runs on the event loop but the making of segments and files, which threads do. After whatever moves the
state machine, `settle` carries out what it wants, in the order that it needs: generations, events, disk jobs.

The first executor that opens the cache fixes the slots' size. One with blocks of another size, or without a lock file
by which the end of its process can be seen, has its device alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cache_svc.disk_calls import DiskCalls
from cache_svc.disk_jobs import DiskEntry, DiskRead, DiskWrite
from cache_svc.disk_scan import DiskScan, Found
from cache_svc.disk_tier import FILE_BYTES, DiskTier
from cache_svc.eviction import EvictionOrder, OrderOf
from cache_svc.kv_events import Feed, Medium
from cache_svc.liveness import LockWatch
from cache_svc.memory_tier import MemoryTier
from cache_svc.mover import DiskReport, Mover
from cache_svc.ticket_streams import Queue, TicketStreams
from cache_svc.tiers import Owner, TierLimits, Tiers
from jitney.block_ops import LowerTiers, Segment
from jitney.errors import Missing
from jitney.serving import logs
from jitney.ticket_ops import Prefetch, TicketCall

STAGING_SLOTS = 32
"""For what goes to the SSD and comes back, however small the CPU tier is."""
IN_FLIGHT_BYTES = 16 << 20
"""On the way to and from the SSD: small blocks are moved many at a time."""
ERASED_AGAIN = 256
"""Slots at a time, of those that the disk would not have erased."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What there is below the device. Of `limits`, the numbers of slots follow from the bytes."""

    shared_dir: Path
    cpu_bytes: int = 0
    ssd_dir: Path | None = None
    ssd_bytes: int = 0
    ssd_file_bytes: int = FILE_BYTES
    limits: TierLimits = field(default_factory=TierLimits)
    order: OrderOf = EvictionOrder


class TierHost:
    """Make it on the event loop, then `prepare`. `tiers` is None before the first Open, and if there are none."""

    def __init__(
        self, settings: TierSettings, name: str, calls: DiskCalls | None = None, feed: Feed | None = None
    ) -> None:
        """`name` is new at every start; `calls` is how the disk is spoken to; `feed` watches the tiers."""
        self.settings = settings
        self.on_settled: Callable[[], None] | None = None
        self._feed = feed
        self.tiers: Tiers | None = None
        self.streams = TicketStreams()
        self.watch = LockWatch()
        self.changes = 0
        self.scanning = False
        self.when_scanned: list[Callable[[], None]] = []
        self.unwanted: Callable[[DiskEntry], bool] = lambda entry: False  # of what the scan finds
        self.memory: MemoryTier | None = None
        self.disk: DiskTier | None = None
        self.mover: Mover | None = None
        self._name = name
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._log = logs.get("tiers")
        self._ready = asyncio.Event()
        self._fitting = asyncio.Lock()
        self.geometry: tuple[int, int] | None = None
        self._scan: DiskScan | None = None
        self._early: list[Found] = []
        self._fenced: set[Owner] = set()

    # Making.

    async def prepare(self) -> None:
        """Makes the segments, looks at what an earlier cache left on the SSD. Conflict if a folder cannot be had."""
        if self.settings.cpu_bytes or self.settings.ssd_dir is not None:
            await asyncio.to_thread(self._make)
        if self.disk is not None and self.disk.layout is not None:
            self.scanning = True
            self._scan = DiskScan(self.disk, self._found_by_thread)
        self._ready.set()

    async def prepared(self) -> None:
        """Waits until `prepare` has ended."""
        await self._ready.wait()

    async def fit(self, block_bytes: int, block_tokens: int) -> Tiers | None:
        """The tiers, if they are there for blocks of that size; the first caller decides it."""
        async with self._fitting:
            await self.prepared()
            if self.memory is None:
                return None
            wanted = (block_bytes, block_tokens)
            if self.geometry is None:
                await self._lay_out(self.memory, *wanted)
                self.geometry = wanted
            if self.geometry != wanted:
                self._log.warning("blocks of another size: no tiers for them", has=self.geometry, wanted=wanted)
                return None
            return self.tiers

    @property
    def segments(self) -> Sequence[Segment]:
        """Of the CPU tier, for executors to map."""
        return self.memory.segments if self.memory is not None else ()

    def _make(self) -> None:
        settings = self.settings
        if settings.ssd_dir is not None:
            self.disk = DiskTier(
                settings.ssd_dir, settings.ssd_bytes, file_bytes=settings.ssd_file_bytes, calls=self._calls
            )
            self.disk.claim()
        self.memory = MemoryTier(settings.shared_dir, self._name, settings.cpu_bytes)
        self.memory.allocate()

    async def _lay_out(self, memory: MemoryTier, block_bytes: int, block_tokens: int) -> None:
        disk, scan = self.disk, self._scan
        if disk is not None and scan is not None and not disk.keeps(block_bytes, block_tokens):
            await asyncio.to_thread(scan.stop)
            self._early.clear()
            self.scanning = False
        await asyncio.to_thread(memory.lay_out, block_bytes, 0 if disk is None else STAGING_SLOTS)
        ssd_slots = 0 if disk is None else await asyncio.to_thread(disk.lay_out, block_bytes, block_tokens)
        if not memory.slots:
            return
        staging = max(0, memory.slots - self.settings.cpu_bytes // memory.slot_bytes)
        limits = replace(
            self.settings.limits,
            cpu_slots=memory.slots,
            ssd_slots=ssd_slots,
            staging_slots=min(staging, memory.slots),
            disk_jobs_in_flight=max(self.settings.limits.disk_jobs_in_flight, IN_FLIGHT_BYTES // memory.slot_bytes),
        )
        feed = self._feed
        self.tiers = Tiers(
            limits,
            eviction=self.settings.order,
            cpu_index=None if feed is None else feed.tier(Medium.CPU, limits.cpu_slots),
            ssd_index=None if feed is None else feed.tier(Medium.SSD, limits.ssd_slots),
        )
        if disk is not None and ssd_slots:
            self.mover = Mover(disk, memory, self._moved_by_thread)
        early, self._early = self._early, []
        for found in early:
            self._found(found)

    # Running.

    def touch(self) -> None:
        """Before the state machine is moved: what time it is."""
        self.changes += 1
        if self.tiers is not None:
            self.tiers.now_us = time.monotonic_ns() // 1000

    def settle(self) -> None:
        """After it was moved, or a ledger was: carries out what it wants, and lets it be known."""
        if self.on_settled is not None:
            self.on_settled()
        tiers, memory = self.tiers, self.memory
        if tiers is None or memory is None:
            return
        tiers.pump()
        for slot, generation in tiers.take_generations():
            memory.set_generation(slot, generation)
        for owner in self.streams.owners:
            if events := tiers.take_events(owner):
                self.streams.tell(owner, events)
        if (jobs := tiers.take_jobs()) and self.mover is not None:
            self.mover.submit(jobs)

    def welcome(self, owner: Owner, queue: Queue) -> None:
        """An executor has opened its stream: it is told all that is open there."""
        self.streams.open(owner, queue)
        if self.tiers is not None:
            self.touch()
            self.streams.tell(owner, self.tiers.open_events(owner))
        self.settle()

    def told(self, owner: Owner, call: TicketCall) -> None:
        """What an executor says. Missing for a ticket that it never had."""
        if self.tiers is None:
            if isinstance(call, Prefetch):
                return
            raise Missing(f"ticket {call.ticket} was never given", field="ticket", value=call.ticket)
        self.touch()
        self.tiers.told(owner, call)
        self.settle()

    def with_rates(self, lower: LowerTiers) -> LowerTiers:
        """With the SSD's measured rates in it. Before anything was read: that of the scan, or that of writes."""
        if self.mover is None:
            return lower
        read, write = self.mover.rates()
        read = read or (self._scan.read_bytes_per_s if self._scan is not None else 0) or write
        return replace(lower, ssd_write_bytes_per_s=write, ssd_read_bytes_per_s=read)

    def fenced(self, owner: Owner) -> None:
        """A later epoch has begun; the process of this one may still copy."""
        self._fenced.add(owner)
        self.settle()

    async def watch_processes(self, every_s: float = 0.2) -> None:
        """Lets go of what processes had that are gone, and has erased what could not be. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(every_s)
            if self.tiers is None:
                continue
            for owner in self.watch.take_gone():
                self._log.info("the executor's process is gone", executor=owner[0], epoch=owner[1])
                self.touch()
                self.tiers.gone(owner)
                self._fenced.discard(owner)
            self.tiers.erase_again(ERASED_AGAIN)
            self.settle()
            for owner in self._fenced.difference(self.tiers.retired()):
                self.watch.forget(owner)
                self._fenced.discard(owner)

    async def close(self, grace_s: float) -> None:
        """Writes what is on its way to the SSD within the grace, then gives everything back."""
        end = self._loop.time() + grace_s
        while self.tiers is not None and self.tiers.room()[1].queue_blocks and self._loop.time() < end:
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(self._close, max(0.0, end - self._loop.time()))
        self.watch.close()

    def _close(self, grace_s: float) -> None:
        if self._scan is not None:
            self._scan.stop()
        if self.mover is not None:
            self.mover.close(grace_s)
        if self.disk is not None:
            self.disk.close()
        if self.memory is not None:
            self.memory.close()

    # What threads say.

    def _moved_by_thread(self, reports: Sequence[DiskReport]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._moved, reports)

    def _found_by_thread(self, found: Found) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._found, found)

    def _moved(self, reports: Sequence[DiskReport]) -> None:
        assert self.tiers is not None
        self.touch()
        for report in reports:
            if isinstance(report.job, DiskWrite):
                self.tiers.written(report.job.job, ok=report.ok)
            elif isinstance(report.job, DiskRead):
                self.tiers.read(report.job.job, ok=report.ok)
            elif report.job.entry is None and not report.ok:
                self.tiers.unerased(report.job.disk_slot)
        self.settle()

    def _found(self, found: Found) -> None:
        if self.tiers is None:
            self._early.append(found)
            return
        self.touch()
        for slot, entry in found:
            if self._feed is not None:
                self._feed.roots.learn(entry.fingerprint)
            if self.unwanted(entry):
                self.tiers.erase(slot)
            else:
                self.tiers.found(slot, entry)
        if not found:
            self.scanning = False
            for again in self.when_scanned:
                again()
            self.when_scanned.clear()
        self.settle()
