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


class BlockRows:
    """Blocks of `block_bytes` in arrays `[rows, >= block_bytes]`, numbered through: all arrays but the last have as
    many rows as the first. The arrays stay where they are, and are kept."""

    def __init__(self, arrays: Sequence[Bytes], block_bytes: int) -> None:
        for array in arrays:
            if array.ndim != 2 or array.shape[1] < block_bytes or array.strides[1] != 1:
                raise ValueError(f"rows of {block_bytes} bytes side by side are wanted, not {array.shape}")
        if any(len(array) != len(arrays[0]) for array in arrays[:-1]):
            raise ValueError("all arrays but the last must have equally many rows")
        self.block_bytes = block_bytes
        self._arrays = arrays
        self._each = max(1, len(arrays[0])) if arrays else 1
        self._rows = sum(map(len, arrays))
        self._starts = np.array([array.ctypes.data for array in arrays], np.uint64)
        self._stride = arrays[0].strides[0] if arrays else 0

    def block(self, row: int) -> Bytes:
        """The bytes of a block."""
        return self._arrays[row // self._each][row % self._each, : self.block_bytes]

    def array_of(self, row: int) -> tuple[Bytes, int]:
        """The array that holds a block, and its row there."""
        return self._arrays[row // self._each], row % self._each

    def addresses(self, rows: Sequence[int]) -> NDArray[np.uint64]:
        """Where these blocks are. IndexError for one that is not here."""
        wanted = np.asarray(rows, np.int64)
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < self._rows:
            raise IndexError(f"a row is outside of 0 to {self._rows - 1}")
        found: NDArray[np.uint64] = self._starts[wanted // self._each]
        return found + (wanted % self._each * self._stride).astype(np.uint64)


class BlockCopier(Protocol):
    """Copies blocks."""

    def copy(self, source: BlockRows, rows: Sequence[int], target: BlockRows, target_rows: Sequence[int]) -> list[int]:
        """Each row to its target row, which no other one overlaps; the checksums of what was copied."""

    def checksums(self, source: BlockRows, rows: Sequence[int]) -> list[int]:
        """Those of these blocks, where they are."""


class NativeCopier:
    """The kernel of copy.c."""

    def __init__(self, library: Library, isa: str | None = None) -> None:
        self._copy_blocks = library.kernel("copy_blocks", library.pick(isa))
        self._hash_blocks = library.kernel("hash_blocks", library.pick(isa))
        self._short = PlainCopier()

    def copy(self, source: BlockRows, rows: Sequence[int], target: BlockRows, target_rows: Sequence[int]) -> list[int]:
        """See BlockCopier."""
        size = _size(source, rows, target, target_rows)
        if size < _LEAST_BYTES:
            return self._short.copy(source, rows, target, target_rows)
        origins, places = source.addresses(rows), target.addresses(target_rows)
        checksums = np.zeros(len(origins), np.uint64)
        self._copy_blocks(origins.ctypes.data, places.ctypes.data, len(origins), size, checksums.ctypes.data)
        found: list[int] = checksums.tolist()
        return found

    def checksums(self, source: BlockRows, rows: Sequence[int]) -> list[int]:
        """See BlockCopier. Other threads of Python run meanwhile."""
        if source.block_bytes < _LEAST_BYTES:
            return self._short.checksums(source, rows)
        places = source.addresses(rows)
        checksums = np.zeros(len(places), np.uint64)
        self._hash_blocks(places.ctypes.data, len(places), source.block_bytes, checksums.ctypes.data)
        found: list[int] = checksums.tolist()
        return found


class PlainCopier:
    """numpy copies, xxhash hashes, piece by piece."""

    def copy(self, source: BlockRows, rows: Sequence[int], target: BlockRows, target_rows: Sequence[int]) -> list[int]:
        """See BlockCopier."""
        size = _size(source, rows, target, target_rows)
        checksums = []
        for row, target_row in zip(rows, target_rows, strict=True):
            origin, place, state = source.block(row), target.block(target_row), xxhash.xxh3_64()
            for start in range(0, size, _PIECE_BYTES):
                piece = place[start : start + _PIECE_BYTES]
                np.copyto(piece, origin[start : start + _PIECE_BYTES])
                state.update(piece)  # type: ignore[arg-type]  # any buffer
            checksums.append(state.intdigest())
        return checksums

    def checksums(self, source: BlockRows, rows: Sequence[int]) -> list[int]:
        """See BlockCopier."""
        return [xxhash.xxh3_64_intdigest(source.block(row)) for row in rows]  # type: ignore[arg-type]  # any buffer


def block_copier() -> BlockCopier:
    """The fastest one here."""
    library = load()
    return NativeCopier(library) if library is not None else PlainCopier()


def _size(source: BlockRows, rows: Sequence[int], target: BlockRows, target_rows: Sequence[int]) -> int:
    if source.block_bytes != target.block_bytes or len(rows) != len(target_rows):
        raise ValueError(
            f"{len(rows)} blocks of {source.block_bytes} bytes to {len(target_rows)} of {target.block_bytes}"
        )
    return source.block_bytes
