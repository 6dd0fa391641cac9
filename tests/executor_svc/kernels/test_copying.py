"""Copied blocks are the same, and so are their checksums, whoever copies."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from executor_svc.kernels.copying import BlockCopier, BlockRows, NativeCopier, PlainCopier, block_copier
from executor_svc.kernels.library import load

LIBRARY = load()
COPIERS: dict[str, BlockCopier] = {"plain": PlainCopier()}
if LIBRARY is not None:
    COPIERS |= {isa: NativeCopier(LIBRARY, isa) for isa in LIBRARY.isas}


@pytest.mark.parametrize("name", COPIERS)
@pytest.mark.parametrize("size", [1, 16, 240, 241, 255, 256, 257, 1024, 1025, 1088, 1089, 4096, 9000, 65536, 589824])
def test_blocks_and_checksums(name: str, size: int) -> None:
    rng = np.random.default_rng(size)
    room = rng.integers(1, 256, 4 * size + 3, np.uint8)
    stride = -(-size // 4096) * 4096
    for shift in (0, 1, 3):  # aligned or not
        source = BlockRows([room[shift : shift + 4 * size].reshape(4, size)], size)
        first, second = (np.zeros(stride * rows + 4096, np.uint8) for rows in (3, 2))
        starts = [-each.ctypes.data % 64 + shift for each in (first, second)]
        arrays = [
            each[start : start + rows * stride].reshape(rows, stride)
            for each, start, rows in zip((first, second), starts, (3, 2), strict=True)
        ]
        target = BlockRows(arrays, size)
        rows, target_rows = (3, 0, 2), (4, 1, 2)
        checksums = COPIERS[name].copy(source, rows, target, target_rows)
        assert checksums == [xxhash.xxh3_64_intdigest(source.block(row).tobytes()) for row in rows]
        assert COPIERS[name].checksums(source, rows) == checksums
        for row, target_row in zip(rows, target_rows, strict=True):
            assert np.array_equal(source.block(row), target.block(target_row))
        assert int(np.count_nonzero(first)) + int(np.count_nonzero(second)) == 3 * size  # nothing beside them


@pytest.mark.parametrize("name", COPIERS)
def test_every_byte_counts(name: str) -> None:
    room = np.zeros((2, 1100), np.uint8)
    blocks = BlockRows([room], 1100)
    seen = set(COPIERS[name].copy(blocks, [0], blocks, [1]))
    for at in range(1100):
        room[0, at] = 1
        seen.update(COPIERS[name].copy(blocks, [0], blocks, [1]))
        room[0, at] = 0
    assert len(seen) == 1101


def test_nothing_to_copy() -> None:
    blocks = BlockRows([np.zeros((1, 300), np.uint8)], 300)
    assert block_copier().copy(blocks, [], blocks, []) == []


@pytest.mark.parametrize("name", COPIERS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    blocks = BlockRows([np.zeros((2, 300), np.uint8)], 300)
    for others, rows in ((BlockRows([np.zeros((2, 300), np.uint8)], 299), [0]), (blocks, [0, 1])):
        with pytest.raises(ValueError, match="blocks of"):
            COPIERS[name].copy(blocks, [0], others, rows)
    for row in (2, 1 << 40):
        with pytest.raises(IndexError):
            COPIERS[name].copy(blocks, [0], blocks, [row])
    with pytest.raises(IndexError):
        blocks.addresses([-1])
    for arrays in ([np.zeros((2, 299), np.uint8)], [np.zeros((2, 600), np.uint8)[:, ::2]], [np.zeros(300, np.uint8)]):
        with pytest.raises(ValueError, match="rows of"):
            BlockRows(arrays, 300)
    with pytest.raises(ValueError, match="equally many"):
        BlockRows([np.zeros((rows, 300), np.uint8) for rows in (2, 1, 2)], 300)
