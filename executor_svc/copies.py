"""Copies between the device pool and the CPU tier's segments, on a thread of their own: CopyPort for a pool in memory.

Loads go before urgent stores, these before demotions; a job is copied in pieces, between which one that goes before it
gets its turn. Each block is copied and hashed while it is in the processor's cache; a load's hash must be the one that
its store gave, and the slot's generation still the ticket's when the copy has ended. An optional limit on bytes per
second spares a machine that needs its memory bandwidth for steps.
"""

from __future__ import annotations

import heapq
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.kernels.copying import BlockRows, block_copier
from executor_svc.ports import Clock, CopyRates, LoadCopied, Moved, StoreCopied
from jitney.block_ops import Block, Segment, block_id
from jitney.ticket_ops import Slot, slot_generation, slot_id

Bytes = NDArray[np.uint8]
LOAD, URGENT, DEMOTION = range(3)
"""What goes first."""
_KEEP = 0.9
"""Of a measured rate, with each new piece."""
PIECE_BYTES = 4 << 20
"""Copied at a time, but a block at least."""
PIECE_S = 0.01
"""What a piece takes at most where copies are limited, so that one that goes before others does not wait for long."""


class SlotFiles:
    """The segments of one CPU tier, mapped. OSError if one cannot be."""

    def __init__(self, segments: Sequence[Segment], block_bytes: int) -> None:
        self._slots_each = segments[0].slots if segments else 1
        slots: list[Bytes] = []
        self._generations: list[NDArray[np.uint32]] = []
        for segment in segments:
            fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                room = mmap.mmap(fd, segment.bytes)
            finally:
                os.close(fd)
            size = segment.slots * segment.slot_bytes
            slots.append(np.frombuffer(room, np.uint8, size).reshape(segment.slots, segment.slot_bytes))
            self._generations.append(np.frombuffer(room, "<u4", segment.slots, size))
        self.rows = BlockRows(slots, block_bytes)
        self._rooms = [(each.ctypes.data, each.nbytes) for each in slots]

    def memory(self) -> Sequence[tuple[int, int]]:
        """Address and bytes of the slots of each segment."""
        return self._rooms

    def current(self, slot: Slot) -> bool:
        """Whether the slot is still what the ticket said."""
        file, place = divmod(slot_id(slot), self._slots_each)
        return int(self._generations[file][place]) == slot_generation(slot)


@dataclass(slots=True)
class _Job:
    """Copies from rows to target rows. `expected`: the checksums of a load, one each; `found`: those so far."""

    rank: int
    number: int
    files: SlotFiles
    rows: list[int]
    target_rows: list[int]
    slots: Sequence[Slot]
    expected: Sequence[int] = ()
    found: list[int] = field(default_factory=list)
    over: bool = False

    def __lt__(self, other: _Job) -> bool:
        return (self.rank, self.number) < (other.rank, other.number)

    @property
    def left(self) -> int:
        """Blocks that are not copied."""
        return 0 if self.over else len(self.rows) - len(self.found)


@dataclass(slots=True)
class Meter:
    """A measured rate, and all that it was measured of."""

    bytes_per_s: float = 0.0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        self.bytes += size
        self.seconds += seconds
        rate = size / max(seconds, 1e-9)
        self.bytes_per_s = _KEEP * self.bytes_per_s + (1 - _KEEP) * rate if self.bytes_per_s else rate


def moved(out: Meter, into: Meter) -> Moved:
    """By the meters of both ways."""
    return Moved(out.bytes, int(out.seconds * 1e6), into.bytes, int(into.seconds * 1e6))


class MemoryCopies:
    """CopyPort. `pool` is the device's: `[blocks, ...]`, contiguous. The end of a job rings the clock's bell."""

    def __init__(self, pool: torch.Tensor, clock: Clock, *, bytes_per_s: int = 0) -> None:
        """`bytes_per_s` 0: as fast as it goes."""
        blocks = pool.shape[0]
        room: Bytes = pool.view(torch.uint8).reshape(blocks, -1).numpy()
        self._block_bytes = room.shape[1]
        self._pool = BlockRows([room], self._block_bytes)
        self._copier = block_copier()
        self._clock = clock
        self._limit = bytes_per_s
        self._files = SlotFiles((), self._block_bytes)
        piece_bytes = min(PIECE_BYTES, int(PIECE_S * bytes_per_s)) if bytes_per_s else PIECE_BYTES
        self._piece = max(1, piece_bytes // self._block_bytes)
        self._jobs: list[_Job] = []  # a heap; the one that is being copied is not in it
        self._current: _Job | None = None
        self._more = threading.Condition()
        self._done: deque[StoreCopied | LoadCopied] = deque()
        self._out, self._in = Meter(), Meter()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def attach(self, segments: Sequence[Segment]) -> None:
        """See CopyPort. OSError if a segment cannot be mapped."""
        self._files = SlotFiles(segments, self._block_bytes)

    def store(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], *, urgent: bool) -> None:
        """See CopyPort."""
        rows, target_rows = [block_id(block) for block in blocks], [slot_id(slot) for slot in slots]
        self._put(_Job(URGENT if urgent else DEMOTION, job, self._files, rows, target_rows, slots))

    def hurry(self, job: int) -> None:
        """See CopyPort."""
        with self._more:
            for each in self._open():
                if each.number == job and each.rank == DEMOTION:
                    each.rank = URGENT
            heapq.heapify(self._jobs)

    def load(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], checksums: Sequence[int]) -> None:
        """See CopyPort."""
        rows, target_rows = [slot_id(slot) for slot in slots], [block_id(block) for block in blocks]
        self._put(_Job(LOAD, job, self._files, rows, target_rows, slots, checksums))

    def poll(self) -> StoreCopied | LoadCopied | None:
        """See CopyPort."""
        return self._done.popleft() if self._done else None

    def rates(self) -> CopyRates:
        """See CopyPort."""
        inward, out = self._in.bytes_per_s or self._out.bytes_per_s, self._out.bytes_per_s or self._in.bytes_per_s
        if not out:
            return CopyRates()
        with self._more:
            loads, urgent = (sum(job.left for job in self._open() if job.rank == rank) for rank in (LOAD, URGENT))
        queue_us = int(loads * self._block_bytes / inward * 1e6)
        return CopyRates(int(out), int(inward), queue_us, queue_us + int(urgent * self._block_bytes / out * 1e6))

    def moved(self) -> Moved:
        """See CopyPort."""
        return moved(self._out, self._in)

    def close(self) -> None:
        """Ends the thread; jobs that have not begun are dropped."""
        with self._more:
            self._closed = True
            self._more.notify()
        self._thread.join()

    def _open(self) -> list[_Job]:
        return self._jobs if self._current is None else [self._current, *self._jobs]

    def _put(self, job: _Job) -> None:
        with self._more:
            heapq.heappush(self._jobs, job)
            self._more.notify()

    def _work(self) -> None:
        while True:
            with self._more:
                while not self._jobs and not self._closed:
                    self._more.wait()
                if self._closed:
                    return
                self._current = job = heapq.heappop(self._jobs)
            found, good = self._copy_piece(job)
            with self._more:
                self._current = None
                job.found += found
                job.over = not good or len(job.found) == len(job.rows)
                if not job.over:
                    heapq.heappush(self._jobs, job)
            if job.over:
                self._done.append(_ended(job))
                self._clock.ring()
            del job  # with its segments, which may be those of a cache that is gone

    def _copy_piece(self, job: _Job) -> tuple[list[int], bool]:
        """The next blocks: their checksums, of a load up to the first bad one; and whether there was none."""
        first = len(job.found)
        rows, target_rows = job.rows[first : first + self._piece], job.target_rows[first : first + self._piece]
        load = job.rank == LOAD
        source, target = (job.files.rows, self._pool) if load else (self._pool, job.files.rows)
        began = time.perf_counter()
        found = self._copier.copy(source, rows, target, target_rows)
        size = len(rows) * self._block_bytes
        if self._limit:
            time.sleep(max(0.0, size / self._limit - (time.perf_counter() - began)))
        (self._in if load else self._out).add(size, time.perf_counter() - began)
        if load:
            for at, checksum in enumerate(found, first):
                if checksum != job.expected[at] or not job.files.current(job.slots[at]):
                    return found[: at - first], False
        return found, True


def _ended(job: _Job) -> StoreCopied | LoadCopied:
    if job.rank == LOAD:
        return LoadCopied(job.number, len(job.rows), len(job.found))
    return StoreCopied(job.number, job.found)
