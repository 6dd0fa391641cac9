"""The threads that copy between CPU tier and SSD: they do the jobs of the state machine and report what became of them.

Neighbours on the disk are moved by one call. A block read is good only if its header names the very entry that was
wanted and its bytes have the entry's checksum. One thread does nothing but reads, so that a request does not wait
behind writes. A disk that hangs keeps its threads, and nothing else.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import xxhash

from cache_svc.disk_header import decode_header, encode_header
from cache_svc.disk_jobs import DiskHeader, DiskJob, DiskRead, DiskWrite
from cache_svc.disk_layout import DiskLayout
from cache_svc.disk_queue import DiskQueue
from cache_svc.disk_tier import DiskTier, aligned
from cache_svc.memory_tier import MemoryTier
from cache_svc.throughput import Throughput
from jitney.serving import logs
from jitney.ticket_ops import slot_id

JOIN_BYTES = 4 << 20
"""So much is moved by one call at most, and at least one block."""
MOST_JOINED = 256
"""Buffers of a call: two a block, and the system takes 1024."""
THREADS = 4


class Outcome(StrEnum):
    """What became of a job."""

    OK = "ok"
    BAD = "bad"  # Another block's header, a torn slot, a wrong checksum.
    FAILED = "failed"  # The system said so.
    DROPPED = "dropped"  # Not tried: the disk failed a short time ago, or the header has no room for the names.


@dataclass(frozen=True, slots=True)
class DiskReport:
    """A job that is done."""

    job: DiskJob
    outcome: Outcome

    @property
    def ok(self) -> bool:
        """Whether the bytes are where they should be."""
        return self.outcome is Outcome.OK


@dataclass(frozen=True, slots=True)
class MoverStatus:
    """What was moved so far; rates are recent ones, 0: unknown. `errors` counts failed calls by their errno's name."""

    read_bytes: int
    read_us: int
    read_bytes_per_s: int
    written_bytes: int
    write_us: int
    write_bytes_per_s: int
    queued: int
    outcomes: dict[Outcome, int]
    errors: dict[str, int]


class Mover:
    """`report` is called by the threads, in no order. Submit from any thread; the tiers must be laid out."""

    def __init__(
        self,
        disk: DiskTier,
        memory: MemoryTier,
        report: Callable[[Sequence[DiskReport]], None],
        *,
        threads: int = THREADS,
        join_bytes: int = JOIN_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert disk.layout is not None, "the SSD's slots are not laid out yet"
        self._disk = disk
        self._memory = memory
        self._report = report
        self._clock = clock
        self._layout: DiskLayout = disk.layout
        self._most = min(MOST_JOINED, max(1, join_bytes // self._layout.slot_bytes))
        self._queue = DiskQueue()
        self._running = 0
        self._closing = False
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)  # one of the threads for all work is woken at a time
        self._more_reads = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._reads, self._writes = Throughput(), Throughput()
        self._outcomes: Counter[Outcome] = Counter()
        self._errors: Counter[str] = Counter()
        self._log = logs.get("mover")
        self._threads = [
            threading.Thread(
                target=self._work, args=(number == 0 and threads > 1,), name=f"mover-{number}", daemon=True
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Sequence[DiskJob]) -> None:
        """Has the jobs done; returns at once."""
        with self._lock:
            for job in jobs:
                self._queue.add(job)
            self._wake()

    def rates(self) -> tuple[int, int]:
        """Bytes a second lately: read, written; 0 unknown."""
        with self._lock:
            return self._reads.bytes_per_s, self._writes.bytes_per_s

    def status(self) -> MoverStatus:
        """Counters and rates."""
        with self._lock:
            return MoverStatus(
                read_bytes=self._reads.total_bytes,
                read_us=int(self._reads.total_s * 1e6),
                read_bytes_per_s=self._reads.bytes_per_s,
                written_bytes=self._writes.total_bytes,
                write_us=int(self._writes.total_s * 1e6),
                write_bytes_per_s=self._writes.bytes_per_s,
                queued=len(self._queue) + self._running,
                outcomes=dict(self._outcomes),
                errors=dict(self._errors),
            )

    def close(self, grace_s: float) -> None:
        """Drops the reads, writes what is queued within the grace, and ends the threads. Blocks."""
        end = time.monotonic() + grace_s
        with self._lock:
            self._queue.drop_reads()
            self._idle.wait_for(lambda: not len(self._queue) and not self._running, max(0.0, grace_s))
            self._closing = True
            self._more.notify_all()
            self._more_reads.notify_all()
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))

    def _work(self, reads_only: bool) -> None:
        pages = [aligned(self._layout.header_bytes) for _ in range(self._most)]
        while run := self._take(reads_only):
            try:
                outcomes = self._move(run, pages)
            except Exception:
                self._log.exception("the mover failed")
                outcomes = [Outcome.FAILED] * len(run)
            self._report([DiskReport(job, outcome) for job, outcome in zip(run, outcomes, strict=True)])
            with self._lock:
                self._running -= len(run)
                self._outcomes.update(outcomes)
                for job in run:
                    self._queue.done(job.disk_slot)
                self._wake()

    def _take(self, reads_only: bool) -> Sequence[DiskJob]:
        """The next run, when there is one; none: the end."""
        more = self._more_reads if reads_only else self._more
        with self._lock:
            more.wait_for(lambda: self._closing or self._queue.can_take(reads_only=reads_only))
            if self._closing:
                return ()
            run = self._queue.take(self._layout, self._most, reads_only=reads_only)
            self._running += len(run)
            self._wake()
            return run

    def _wake(self) -> None:
        """Who takes something wakes the next one, as long as there is something to take."""
        if self._queue.can_take(reads_only=True):
            self._more_reads.notify()
        if self._queue.can_take(reads_only=False):
            self._more.notify()
        elif not self._running:
            self._idle.notify_all()

    def _move(self, run: Sequence[DiskJob], pages: Sequence[memoryview]) -> Sequence[Outcome]:
        if isinstance(run[0], DiskRead):
            return self._read([job for job in run if isinstance(job, DiskRead)], pages)
        if isinstance(run[0], DiskWrite):
            return self._write([job for job in run if isinstance(job, DiskWrite)], pages)
        return [self._head(job, pages[0]) for job in run if isinstance(job, DiskHeader)]

    def _read(self, run: Sequence[DiskRead], pages: Sequence[memoryview]) -> Sequence[Outcome]:
        views = [self._memory.view(slot_id(job.cpu_slot)) for job in run]
        buffers = [part for pair in zip(pages, views, strict=False) for part in pair]
        self._begin(self._reads)
        whole = 0
        try:
            whole = self._disk.read(run[0].disk_slot, buffers)
        except OSError as error:
            self._failed(error)
            return [Outcome.FAILED] * len(run)
        finally:
            self._end(self._reads, whole)
        return [
            Outcome.OK if number < whole and self._is_good(job, pages[number], views[number]) else Outcome.BAD
            for number, job in enumerate(run)
        ]

    def _is_good(self, job: DiskRead, page: memoryview, view: memoryview) -> bool:
        block_bytes = self._layout.block_bytes
        expected = encode_header(job.entry, len(page), block_bytes)
        if expected is None or bytes(page[: len(expected)]) != expected:
            found = decode_header(page, block_bytes)
            if found is None or replace(found, place=job.entry.place) != job.entry:
                return False
        return xxhash.xxh3_64_intdigest(view[:block_bytes]) == job.entry.checksum

    def _write(self, run: Sequence[DiskWrite], pages: Sequence[memoryview]) -> Sequence[Outcome]:
        for job, page in zip(run, pages, strict=False):
            header = encode_header(job.entry, self._layout.header_bytes, self._layout.block_bytes)
            if header is None:
                return self._write_around(run, job, pages)
            page[:] = header.ljust(len(page), b"\0")
        views = [self._memory.view(slot_id(job.cpu_slot)) for job in run]
        return [
            self._written(run[0].disk_slot, [part for pair in zip(pages, views, strict=False) for part in pair])
        ] * len(run)

    def _write_around(self, run: Sequence[DiskWrite], job: DiskWrite, pages: Sequence[memoryview]) -> list[Outcome]:
        """Writes what stands before and behind a job that cannot be written."""
        at = run.index(job)
        before = self._write(run[:at], pages) if at else ()
        behind = self._write(run[at + 1 :], pages) if at + 1 < len(run) else ()
        return [*before, Outcome.DROPPED, *behind]

    def _head(self, job: DiskHeader, page: memoryview) -> Outcome:
        header = b"" if job.entry is None else encode_header(job.entry, len(page), self._layout.block_bytes)
        if header is None:
            return Outcome.DROPPED
        page[:] = header.ljust(len(page), b"\0")
        return self._written(job.disk_slot, [page])

    def _written(self, slot: int, buffers: Sequence[memoryview]) -> Outcome:
        self._begin(self._writes)
        slots = 0
        try:
            self._disk.write(slot, buffers)
            slots = len(buffers) // 2
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return Outcome.DROPPED
            self._failed(error)
            return Outcome.FAILED
        finally:
            self._end(self._writes, slots)
        return Outcome.OK

    def _begin(self, rate: Throughput) -> None:
        with self._lock:
            rate.began(self._clock())

    def _end(self, rate: Throughput, slots: int) -> None:
        with self._lock:
            rate.ended(self._clock(), slots * self._layout.block_bytes)

    def _failed(self, error: OSError) -> None:
        with self._lock:
            self._errors[errno.errorcode.get(error.errno or 0, "unknown")] += 1
