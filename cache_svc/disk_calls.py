"""What the SSD tier asks of the operating system: one place for it, so that tests can put a failing disk there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cache_svc.shared_area import FILE_MODE

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class DiskCalls:
    """Calls of the operating system; each raises OSError."""

    def open(self, path: Path, *, direct: bool) -> int:
        """A descriptor of the file, made if it is not there."""
        return os.open(path, _FLAGS | (os.O_DIRECT if direct else 0), FILE_MODE)

    def allocate(self, file: int, start: int, size: int) -> None:
        """Gives the file room on the disk."""
        os.posix_fallocate(file, start, size)

    def read(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read; fewer than there is room for at the end of the file."""
        return os.preadv(file, buffers, offset)

    def write(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes written."""
        return os.pwritev(file, buffers, offset)
