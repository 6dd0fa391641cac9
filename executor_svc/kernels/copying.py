"""Copies of blocks with their checksums: native in one pass where the kernels are, numpy and xxhash otherwise.

Both give the same bits: xxh3_64 of a block's bytes, by which executor and cache know that it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from executor_svc.kernels.library import Library, load

Bytes = NDArray[np.uint8]
_LEAST_BYTES = 241
"""Shorter inputs are hashed in other ways, which the kernel does not know."""
_PIECE_BYTES = 256 << 10
"""Copied, then hashed while it is in the processor's cache."""


class BlockCopier(Protocol):
    """Copies blocks."""

    def copy(self, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> list[int]:
        """Each source `[bytes]` to its target; the checksums of what was copied. All of one size, none overlap."""


class NativeCopier:
    """The kernel of copy.c."""

    def __init__(self, library: Library, isa: str | None = None) -> None:
        self._copy_blocks = library.kernel("copy_blocks", library.pick(isa))
        self._short = PlainCopier()

    def copy(self, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> list[int]:
        """See BlockCopier."""
        if not sources or len(sources[0]) < _LEAST_BYTES:
            return self._short.copy(sources, targets)
        size = len(sources[0])
        for array in (*sources, *targets):
            if len(array) != size or array.strides != (1,):
                raise ValueError(f"blocks must be {size} bytes side by side, one is {array.shape} {array.strides}")
        origins, places = (np.array([each.ctypes.data for each in arrays], np.uint64) for arrays in (sources, targets))
        checksums = np.zeros(len(sources), np.uint64)
        self._copy_blocks(origins.ctypes.data, places.ctypes.data, len(sources), size, checksums.ctypes.data)
        found: list[int] = checksums.tolist()
        return found


class PlainCopier:
    """numpy copies, xxhash hashes, piece by piece."""

    def copy(self, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> list[int]:
        """See BlockCopier."""
        checksums = []
        for source, target in zip(sources, targets, strict=True):
            state = xxhash.xxh3_64()
            for start in range(0, len(source), _PIECE_BYTES):
                piece = target[start : start + _PIECE_BYTES]
                np.copyto(piece, source[start : start + _PIECE_BYTES])
                state.update(piece)  # type: ignore[arg-type]  # any buffer
            checksums.append(state.intdigest())
        return checksums


def block_copier() -> BlockCopier:
    """The fastest one here."""
    library = load()
    return NativeCopier(library) if library is not None else PlainCopier()
