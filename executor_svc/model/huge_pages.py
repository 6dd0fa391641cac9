"""Memory in large pages where the kernel has them: weights are read from end to end at every step, and the processor's
table of addresses is small."""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import torch

_PAGE = 2 << 20
_ALIGNMENT = 64


class HugePages:
    """Takes memory in large mappings and gives it out in pieces, in any thread; a mapping lives as long as they do."""

    def __init__(self, mapping_bytes: int = 64 << 20) -> None:
        self._mapping_bytes = mapping_bytes
        self._free = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def take(self, size: int) -> torch.Tensor:
        """uint8 `[size]`, zeros, from a cache line's start on."""
        with self._lock:
            if len(self._free) < size:
                self._free = _mapped(max(size, self._mapping_bytes))
            piece, self._free = self._free[:size], self._free[size + -size % _ALIGNMENT :]
            return piece


def _mapped(size: int) -> torch.Tensor:
    room = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            room.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    skipped = -whole.data_ptr() % _PAGE
    return whole[skipped : skipped + size]
