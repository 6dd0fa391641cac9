"""One file of the SSD tier: opened when it is needed, found again when it was removed or replaced, given back whole.

Any thread may read and write; a descriptor is closed when its last user is done. A file that cannot be opened is tried
again after a pause. Direct I/O where the file system has it; elsewhere the page cache is told to forget.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cache_svc.backoff import Backoff
from cache_svc.disk_calls import DiskCalls

CHUNK_BYTES = 64 << 20
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class _Handle:
    file: int
    identity: tuple[int, int]
    direct: bool
    users: int = 0
    retired: bool = False


class Unopened(OSError):
    """The file cannot be opened now: this says nothing of the others."""


class SlotFile:
    """`size_bytes` on the disk at `path`. `home` makes the directory if it is gone; like all here it raises OSError."""

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        calls: DiskCalls,
        clock: Callable[[], float],
        home: Callable[[], None],
    ) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._calls = calls
        self._clock = clock
        self._home = home
        self._lock = threading.Lock()
        self._handle: _Handle | None = None
        self._direct = True
        self._backoff = Backoff()
        self._why = errno.EIO

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fills the buffers; returns the bytes read, fewer where the file is too short."""
        return self._transfer(self._calls.read, buffers, offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Writes the buffers."""
        wanted = sum(map(len, buffers))
        if self._transfer(self._calls.write, buffers, offset) < wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def allocate(self) -> int:
        """Makes the file as large as it shall be, or as the disk allows; its size."""
        with self._lock:
            if self._handle is None:
                self._handle = self._opened()
            file = self._handle.file
            try:
                self._fill(file)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self.size_bytes = os.fstat(file).st_size
        return self.size_bytes

    def close(self) -> None:
        """Closes the file once nobody uses it any more."""
        with self._lock:
            self._retire()

    def _transfer(
        self, call: Callable[[int, Sequence[memoryview], int], int], buffers: Sequence[memoryview], offset: int
    ) -> int:
        while True:
            with self._use() as handle:
                try:
                    count = call(handle.file, buffers, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or not handle.direct:
                        raise
                    self._direct = False  # it could be opened so, but not be used
                else:
                    if not handle.direct and hasattr(os, "posix_fadvise"):
                        os.posix_fadvise(handle.file, offset, count, os.POSIX_FADV_DONTNEED)
                    return count
            with self._lock:
                self._retire()

    @contextmanager
    def _use(self) -> Iterator[_Handle]:
        with self._lock:
            if self._handle is not None and self._is_lost(self._handle):
                self._retire()
            handle = self._handle or self._reopened()
            self._handle = handle
            handle.users += 1
        try:
            yield handle
        finally:
            with self._lock:
                handle.users -= 1
                self._close_unused(handle)

    def _is_lost(self, handle: _Handle) -> bool:
        """Whether another file, or none, is at the path now."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != handle.identity

    def _reopened(self) -> _Handle:
        """The file at its full size, unless that failed a short time ago."""
        if not self._backoff.ready(self._clock()):
            raise Unopened(self._why, os.strerror(self._why), str(self.path))
        handle = None
        try:
            handle = self._opened()
            self._fill(handle.file)
        except OSError as error:
            if handle is not None:
                os.close(handle.file)
            self._backoff.failed(self._clock())
            self._why = error.errno or errno.EIO
            raise Unopened(self._why, error.strerror, str(self.path)) from error
        self._backoff.worked()
        return handle

    def _opened(self) -> _Handle:
        """The file, made if it is not there. What stands in its place and cannot be opened is removed first."""
        self._home()
        try:
            file = self._open()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP):
                raise
            self.path.unlink()
            file = self._open()
        found = os.fstat(file)
        return _Handle(file, (found.st_dev, found.st_ino), self._direct)

    def _open(self) -> int:
        try:
            return self._calls.open(self.path, direct=self._direct)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = False
            return self._calls.open(self.path, direct=False)

    def _fill(self, file: int) -> None:
        """Gives the file its size and all its room, chunk by chunk."""
        found = os.fstat(file)
        if found.st_size > self.size_bytes:
            os.ftruncate(file, self.size_bytes)
        if found.st_size == self.size_bytes and found.st_blocks * 512 >= self.size_bytes:
            return
        for start in range(0, self.size_bytes, CHUNK_BYTES):
            try:
                self._calls.allocate(file, start, min(CHUNK_BYTES, self.size_bytes - start))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file, start)
                raise

    def _retire(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.retired = True
            self._close_unused(handle)

    def _close_unused(self, handle: _Handle) -> None:
        if handle.retired and not handle.users:
            with suppress(OSError):
                os.close(handle.file)
