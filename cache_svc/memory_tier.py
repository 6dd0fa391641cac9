"""The bytes of the CPU tier: segments of shared memory, one slot a block, that executors map and copy to and from.

Segments are files of at most 1 GiB (one large file serialises page faults), created exclusively, and filled with pages
before anybody maps them: a full file system is a smaller tier here, not a bus error in an executor later. Behind the
slots of a segment stand their generations, uint32 each: written here before anybody is told of a slot's new block.

Two steps: `allocate` at the start, while nobody knows yet how large a block is; `lay_out` once it is known.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache_svc.pages import PAGE_BYTES, paged
from cache_svc.shared_area import FILE_MODE, SharedArea
from jitney.block_ops import Segment
from jitney.serving import logs

SEGMENT_BYTES = 1 << 30
CHUNK_BYTES = 64 << 20
GENERATION_BYTES = 4


class MemoryTier:
    """Owns the segments. `slots` and `slot_bytes` are 0 before `lay_out`; slots are numbered through all segments."""

    def __init__(self, shared: Path, name: str, limit_bytes: int, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._area = SharedArea(shared, name)
        self._limit_bytes = limit_bytes // PAGE_BYTES * PAGE_BYTES
        self._segment_bytes = segment_bytes
        self._log = logs.get("memory_tier")
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._generations: list[NDArray[np.uint32]] = []
        self.segments: list[Segment] = []
        self.slots = 0
        self.slot_bytes = 0
        self._segment_slots = 1

    @property
    def bytes(self) -> int:
        """Of all segments; never above the limit, but for a ring of staging slots."""
        return sum(len(each) for each in self._maps)

    def allocate(self) -> None:
        """Makes and fills the segments, as many as there is room for. Takes some 0.3 s a GiB."""
        self._allocate(self._limit_bytes)

    def lay_out(self, block_bytes: int, least_slots: int = 0) -> None:
        """Divides the segments into slots, at least `least_slots` of them: for these the limit is no limit."""
        assert not self.segments, "the slots are laid out already"
        self.slot_bytes = paged(block_bytes)
        slots = sum(self._fitting(each) for each in self._maps)
        if slots < least_slots:
            self._unmap()
            for path in self._area.path.glob("segment-*"):
                path.unlink()
            self._allocate(paged(least_slots * (self.slot_bytes + GENERATION_BYTES)))
        for number, room in enumerate(self._maps):
            count = self._fitting(room)
            if count == 0:
                continue
            self.segments.append(Segment(str(self._path(number)), len(room), count, self.slot_bytes))
            table = np.frombuffer(room, "<u4", count, count * self.slot_bytes)
            self._generations.append(table)
            self._views.append(memoryview(room))
        self.slots = sum(segment.slots for segment in self.segments)
        self._segment_slots = self.segments[0].slots if self.segments else 1
        self._log.info("CPU tier", slots=self.slots, slot_bytes=self.slot_bytes, bytes=self.bytes)

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, padding included: page-aligned, for reading and writing."""
        segment, number = divmod(slot, self._segment_slots)
        start = number * self.slot_bytes
        return self._views[segment][start : start + self.slot_bytes]

    def set_generation(self, slot: int, generation: int) -> None:
        """What the slot holds is another block from here on."""
        segment, number = divmod(slot, self._segment_slots)
        self._generations[segment][number] = generation

    def close(self) -> None:
        """Removes the segments' files and unmaps them. Nobody may use a view any more."""
        self._unmap()
        self._area.close()

    def _fitting(self, room: mmap.mmap) -> int:
        return len(room) // (self.slot_bytes + GENERATION_BYTES)

    def _path(self, number: int) -> Path:
        return self._area.path / f"segment-{number}"

    def _allocate(self, wanted: int) -> None:
        left = wanted
        while left:
            size = min(left, self._segment_bytes)
            got = self._make_segment(size)
            left -= size
            if got < size:
                self._log.warning("shared memory is full: a smaller CPU tier", bytes=self.bytes, wanted=wanted)
                break

    def _make_segment(self, size: int) -> int:
        """A segment of `size` bytes, or fewer if there is no room; its bytes, 0 if it was not made."""
        number = len(self._maps)
        file = os.open(self._path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            got = _fill(file, size)
            if got:
                self._maps.append(mmap.mmap(file, got))
        finally:
            os.close(file)
        if not got:
            self._path(number).unlink()
        return got

    def _unmap(self) -> None:
        self._generations.clear()
        for view in self._views:
            view.release()
        self._views.clear()
        for room in self._maps:
            with suppress(BufferError):  # a thread that hangs in the kernel still reads it: it goes with the process
                room.close()
        self._maps.clear()


def _fill(file: int, size: int) -> int:
    """Gives the file pages, chunk by chunk; how many bytes it got."""
    for start in range(0, size, CHUNK_BYTES):
        try:
            os.posix_fallocate(file, start, min(CHUNK_BYTES, size - start))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
                raise
            os.ftruncate(file, start)
            return start
    return size
