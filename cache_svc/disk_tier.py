"""The bytes of the SSD tier: preallocated slots in a few files, written without fsync, believed by checksum only.

`claim` at the start: the directory is locked and cut down to the limit, and the headers of an earlier cache can be
scanned. `lay_out` once the block size is known: slots of another size are dropped, missing files are made. Both block,
and belong in a thread. Afterwards any thread reads and writes runs of slots; what fails raises OSError and harms
nobody. Writes that failed are refused for a while, so that a full or dying disk is not asked for every block.
"""

from __future__ import annotations

import errno
import mmap
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cache_svc.backoff import Backoff
from cache_svc.disk_calls import DiskCalls
from cache_svc.disk_directory import DiskDirectory
from cache_svc.disk_header import decode_header
from cache_svc.disk_jobs import DiskEntry
from cache_svc.disk_layout import DiskLayout
from cache_svc.slot_file import SlotFile, Unopened
from jitney.serving import logs

FILE_BYTES = 1 << 30
_SPARE_DESCRIPTORS = 512


class DiskTier:
    """Owns the files. `layout` is None before anything is known of the slots."""

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        *,
        file_bytes: int = FILE_BYTES,
        calls: DiskCalls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout: DiskLayout | None = None
        self._limit_bytes = limit_bytes
        self._file_bytes = file_bytes
        self._calls = calls or DiskCalls()
        self._clock = clock
        self._log = logs.get("disk_tier")
        self._directory = DiskDirectory(directory)
        self._files: list[SlotFile] = []
        self._left_bytes: list[int] = []  # of each file, when the cache started
        self._backoff = Backoff()
        self._backoff_lock = threading.Lock()

    def claim(self) -> None:
        """Cuts what an earlier cache left down to the limit. What remains can be scanned, and read."""
        found = self._directory.tidy(self._limit_bytes)
        if found is not None:
            self._take(found)
            self._left_bytes = [_size(file.path) for file in self._files]

    def lay_out(self, block_bytes: int, block_tokens: int) -> int:
        """The number of slots for blocks of that size; fewer than fit the limit if the disk has no room for them."""
        wanted = DiskLayout.of_block(block_bytes, block_tokens, self._file_bytes).fitting(self._limit_bytes)
        if self.layout is not None and not self.keeps(block_bytes, block_tokens):
            self._log.warning("blocks of another size: the SSD starts empty", was=self.layout.block_bytes)
            self.close_files()
            self._directory.drop(self.layout)
            self._left_bytes = []
            self.layout = None
        if self.layout is None:
            self._take(wanted)
        slots = self._allocate(wanted)
        self.layout = replace(wanted, slots=slots)
        self._log.info("SSD tier", slots=slots, slot_bytes=wanted.slot_bytes, files=self.layout.files)
        return slots

    def keeps(self, block_bytes: int, block_tokens: int) -> bool:
        """Whether what an earlier cache left is of use for blocks of that size."""
        wanted = DiskLayout.of_block(block_bytes, block_tokens, self._file_bytes)
        return self.layout is not None and self.layout.same_slots(wanted)

    def scan(self, stop: Callable[[], bool]) -> Iterator[tuple[int, DiskEntry]]:
        """The slots that an earlier cache filled, as their headers say; `stop` is asked at each."""
        layout = self.layout
        if layout is None:
            return
        page = aligned(layout.header_bytes)
        for number, (file, left) in enumerate(zip(self._files, self._left_bytes, strict=False)):
            for index in range(left // layout.slot_bytes):
                if stop():
                    return
                with suppress(OSError):
                    if file.read([page], index * layout.slot_bytes) == len(page):
                        entry = decode_header(page, layout.block_bytes)
                        if entry is not None:
                            yield number * layout.file_slots + index, entry

    def read_rate(self, slots: Sequence[int]) -> int:
        """Bytes a second of reading these slots one after the other; 0 if none could be read."""
        layout = self._laid_out()
        room = aligned(layout.slot_bytes)
        count, began = 0, self._clock()
        for slot in slots:
            with suppress(OSError):
                count += self.read(slot, [room]) * layout.block_bytes
        return int(count / max(self._clock() - began, 1e-6))

    def read(self, slot: int, buffers: Sequence[memoryview]) -> int:
        """Reads slots from `slot` on, all of one file, into pairs of header and block; how many came whole."""
        layout = self._laid_out()
        number, offset = layout.place(slot)
        return self._files[number].read(buffers, offset) // layout.slot_bytes

    def write(self, slot: int, buffers: Sequence[memoryview]) -> None:
        """Writes pairs of header and block, or only a header, to slots from `slot` on, all of one file."""
        number, offset = self._laid_out().place(slot)
        with self._backoff_lock:
            if not self._backoff.ready(self._clock()):
                raise OSError(errno.EAGAIN, "the disk failed a short time ago")
        try:
            self._files[number].write(buffers, offset)
        except Unopened:
            raise
        except OSError as error:
            with self._backoff_lock:
                self._backoff.failed(self._clock())
            self._log.warning("the SSD cannot be written", error=str(error))
            raise
        with self._backoff_lock:
            self._backoff.worked()

    def close_files(self) -> None:
        """Closes what is open; it is opened again when it is used."""
        for file in self._files:
            file.close()

    def close(self) -> None:
        """Lets another cache have the directory."""
        self.close_files()
        self._directory.close()

    def _laid_out(self) -> DiskLayout:
        assert self.layout is not None, "the SSD's slots are not laid out yet"
        return self.layout

    def _take(self, layout: DiskLayout) -> None:
        self.layout = layout
        _allow_descriptors(layout.files + _SPARE_DESCRIPTORS)
        self._files = [
            SlotFile(
                self._directory.path / layout.name(number),
                layout.file_bytes(number),
                self._calls,
                self._clock,
                self._directory.ensure,
            )
            for number in range(layout.files)
        ]

    def _allocate(self, wanted: DiskLayout) -> int:
        """Makes the files; how many slots there are. A disk that only fails now may have them all later."""
        for number, file in enumerate(self._files):
            size = wanted.file_bytes(number)
            try:
                got = file.allocate()
            except OSError as error:
                self._log.warning("a file of the SSD cannot be used now", path=str(file.path), error=str(error))
                continue
            if got < size:
                self._log.warning("the disk is full: a smaller SSD tier", path=str(file.path), bytes=got, wanted=size)
                del self._files[number + 1 :]
                return number * wanted.file_slots + got // wanted.slot_bytes
        return wanted.slots


def aligned(count: int) -> memoryview:
    """A buffer that direct I/O can use."""
    return memoryview(mmap.mmap(-1, count))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _allow_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
