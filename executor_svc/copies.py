"""Copies between the device pool and the CPU tier's segments, on a thread of their own: CopyPort for a pool in memory.

Loads go before urgent stores, these before demotions. Each block is copied and hashed while it is in the processor's
cache; a load's hash must be the one that its store gave, and the slot's generation still the ticket's when the copy has
ended. An optional limit on bytes per second spares a machine that needs its memory bandwidth for steps.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.kernels.copying import BlockRows, block_copier
from executor_svc.ports import Clock, CopyRates, LoadCopied, StoreCopied
from jitney.block_ops import Block, Segment, block_id
from jitney.ticket_ops import Slot, slot_generation, slot_id

Bytes = NDArray[np.uint8]
_LOAD, _URGENT, _DEMOTION = range(3)
_KEEP = 0.9
"""Of a measured rate, with each new copy."""


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

    def current(self, slot: Slot) -> bool:
        """Whether the slot is still what the ticket said."""
        file, place = divmod(slot_id(slot), self._slots_each)
        return int(self._generations[file][place]) == slot_generation(slot)


@dataclass(slots=True)
class _Meter:
    """A measured rate and what waits for it."""

    bytes_per_s: float = 0.0
    waiting: int = 0  # bytes

    def add(self, size: int, seconds: float) -> None:
        rate = size / max(seconds, 1e-9)
        self.bytes_per_s = _KEEP * self.bytes_per_s + (1 - _KEEP) * rate if self.bytes_per_s else rate


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
        self._jobs: list[tuple[int, int, Callable[[], StoreCopied | LoadCopied]]] = []
        self._order = itertools.count()
        self._more = threading.Condition()
        self._done: deque[StoreCopied | LoadCopied] = deque()
        self._out, self._in = _Meter(), _Meter()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def attach(self, segments: Sequence[Segment]) -> None:
        """See CopyPort. OSError if a segment cannot be mapped."""
        self._files = SlotFiles(segments, self._block_bytes)

    def store(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], *, urgent: bool) -> None:
        """See CopyPort."""
        files = self._files
        self._put(
            _URGENT if urgent else _DEMOTION, self._out, len(blocks), lambda: self._store(job, files, blocks, slots)
        )

    def load(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], checksums: Sequence[int]) -> None:
        """See CopyPort."""
        files = self._files
        self._put(_LOAD, self._in, len(blocks), lambda: self._load(job, files, blocks, slots, checksums))

    def poll(self) -> StoreCopied | LoadCopied | None:
        """See CopyPort."""
        return self._done.popleft() if self._done else None

    def rates(self) -> CopyRates:
        """See CopyPort."""
        inward = self._in.bytes_per_s or self._out.bytes_per_s
        queue_us = int(self._in.waiting / inward * 1e6) if inward else 0
        return CopyRates(int(self._out.bytes_per_s or inward), int(inward), queue_us)

    def close(self) -> None:
        """Ends the thread; jobs that have not begun are dropped."""
        with self._more:
            self._closed = True
            self._more.notify()
        self._thread.join()

    def _put(self, rank: int, meter: _Meter, blocks: int, run: Callable[[], StoreCopied | LoadCopied]) -> None:
        size = blocks * self._block_bytes

        def measured() -> StoreCopied | LoadCopied:
            began = time.perf_counter()
            result = run()
            if self._limit:
                time.sleep(max(0.0, size / self._limit - (time.perf_counter() - began)))
            with self._more:
                meter.add(size, time.perf_counter() - began)
                meter.waiting -= size
            return result

        with self._more:
            meter.waiting += size
            heapq.heappush(self._jobs, (rank, next(self._order), measured))
            self._more.notify()

    def _work(self) -> None:
        while True:
            with self._more:
                while not self._jobs and not self._closed:
                    self._more.wait()
                if self._closed:
                    return
                _, _, run = heapq.heappop(self._jobs)
            self._done.append(run())
            del run  # with the segments that it copied from or to, which may be those of a cache that is gone
            self._clock.ring()

    def _store(self, job: int, files: SlotFiles, blocks: Sequence[Block], slots: Sequence[Slot]) -> StoreCopied:
        rows, target_rows = [block_id(block) for block in blocks], [slot_id(slot) for slot in slots]
        return StoreCopied(job, self._copier.copy(self._pool, rows, files.rows, target_rows))

    def _load(
        self, job: int, files: SlotFiles, blocks: Sequence[Block], slots: Sequence[Slot], checksums: Sequence[int]
    ) -> LoadCopied:
        rows, target_rows = [slot_id(slot) for slot in slots], [block_id(block) for block in blocks]
        found = self._copier.copy(files.rows, rows, self._pool, target_rows)
        good = 0
        for slot, checksum, copied in zip(slots, checksums, found, strict=True):
            if copied != checksum or not files.current(slot):
                break
            good += 1
        return LoadCopied(job, len(blocks), good)
