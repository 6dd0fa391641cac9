"""Copied blocks are the same, and so are their checksums, whoever copies."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from executor_svc.kernels.copying import BlockCopier, NativeCopier, PlainCopier, block_copier
from executor_svc.kernels.library import load

LIBRARY = load()
COPIERS: dict[str, BlockCopier] = {"plain": PlainCopier()}
if LIBRARY is not None:
    COPIERS |= {isa: NativeCopier(LIBRARY, isa) for isa in LIBRARY.isas}


@pytest.mark.parametrize("name", COPIERS)
@pytest.mark.parametrize("size", [1, 16, 240, 241, 255, 256, 257, 1024, 1025, 1088, 1089, 4096, 9000, 65536, 589824])
def test_blocks_and_checksums(name: str, size: int) -> None:
    rng = np.random.default_rng(size)
    room = rng.integers(0, 256, 3 * size + 3, np.uint8)
    for shift in (0, 1, 3):  # aligned or not
        sources = [room[shift + start : shift + start + size] for start in (2 * size, 0, size)]
        target_room = np.zeros(4 * size + 4096, np.uint8)
        aligned = -target_room.ctypes.data % 64
        targets = [
            target_room[aligned + shift + start : aligned + shift + start + size]
            for start in (0, size + 7, 2 * size + 64)
        ]
        assert COPIERS[name].copy(sources, targets) == [xxhash.xxh3_64_intdigest(each.tobytes()) for each in sources]
        for source, target in zip(sources, targets, strict=True):
            assert np.array_equal(source, target)
        written = sum(int(np.count_nonzero(target)) for target in targets)
        assert int(np.count_nonzero(target_room)) == written  # nothing beside them


@pytest.mark.parametrize("name", COPIERS)
def test_every_byte_counts(name: str) -> None:
    source = np.zeros(1100, np.uint8)
    target = np.empty_like(source)
    (empty,) = COPIERS[name].copy([source], [target])
    seen = {empty}
    for at in range(len(source)):
        source[at] = 1
        seen.update(COPIERS[name].copy([source], [target]))
        source[at] = 0
    assert len(seen) == len(source) + 1


def test_nothing_to_copy() -> None:
    assert block_copier().copy([], []) == []


def test_blocks_that_do_not_fit_are_refused() -> None:
    if LIBRARY is None:
        pytest.skip("no compiler")
    copier = NativeCopier(LIBRARY)
    room = np.zeros(2000, np.uint8)
    for targets in ([room[:999]], [room[::2]]):
        with pytest.raises(ValueError, match="side by side"):
            copier.copy([np.zeros(1000, np.uint8)], targets)
