"""Blocks go to slots and come back whole; what is not what it should be is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from executor_svc.clock import MonotonicClock
from executor_svc.copies import MemoryCopies, SlotFiles
from executor_svc.lock_file import LockFile
from executor_svc.ports import LoadCopied, StoreCopied
from jitney.block_ops import Segment, handle
from jitney.errors import Conflict
from jitney.ticket_ops import Slot

BLOCKS, BLOCK_BYTES, SLOT_BYTES, SLOTS = 8, 5000, 8192, 3


def segment(path: Path, generation: int = 1) -> Segment:
    size = SLOTS * SLOT_BYTES
    path.write_bytes(bytes(size) + np.full(SLOTS, generation, "<u4").tobytes())
    return Segment(str(path), size + 4 * SLOTS, SLOTS, SLOT_BYTES)


def slot(number: int, generation: int = 1) -> Slot:
    return Slot(generation << 32 | number)


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8)


@pytest.fixture
def copies(pool: torch.Tensor, tmp_path: Path) -> Iterator[MemoryCopies]:
    copies = MemoryCopies(pool, MonotonicClock())
    copies.attach([segment(tmp_path / "0"), segment(tmp_path / "1")])
    yield copies
    copies.close()


def ended(copies: MemoryCopies) -> StoreCopied | LoadCopied:
    while (found := copies.poll()) is None:
        pass
    return found


def test_blocks_go_and_come_back(copies: MemoryCopies, pool: torch.Tensor) -> None:
    slots = [slot(4), slot(0), slot(5)]
    copies.store(1, [handle(2, 1), handle(3, 1), handle(7, 9)], slots, urgent=False)
    stored = ended(copies)
    assert isinstance(stored, StoreCopied)
    assert stored.checksums == [xxhash.xxh3_64_intdigest(pool[i].numpy().tobytes()) for i in (2, 3, 7)]
    wanted = pool[[2, 3, 7]].clone()
    copies.load(2, [handle(0, 1), handle(1, 1), handle(2, 2)], slots, stored.checksums)
    assert ended(copies) == LoadCopied(2, 3, 3)
    assert torch.equal(pool[:3], wanted)
    assert copies.rates().to_host_bytes_per_s > 0
    assert copies.rates().to_device_bytes_per_s > 0


def test_a_flipped_bit_ends_the_good_ones(copies: MemoryCopies, tmp_path: Path) -> None:
    slots = [slot(0), slot(1), slot(2)]
    copies.store(1, [handle(i, 1) for i in range(3)], slots, urgent=True)
    stored = ended(copies)
    assert isinstance(stored, StoreCopied)
    content = bytearray((tmp_path / "0").read_bytes())
    content[SLOT_BYTES + 77] ^= 4
    with (tmp_path / "0").open("r+b") as file:
        file.write(content)
    copies.load(2, [handle(i, 1) for i in range(3, 6)], slots, stored.checksums)
    assert ended(copies) == LoadCopied(2, 3, 1)


def test_a_slot_that_was_given_away_is_no_good(copies: MemoryCopies) -> None:
    copies.store(1, [handle(0, 1), handle(1, 1)], [slot(0), slot(3)], urgent=False)
    stored = ended(copies)
    assert isinstance(stored, StoreCopied)
    copies.load(2, [handle(4, 1), handle(5, 1)], [slot(0), slot(3, generation=2)], stored.checksums)
    assert ended(copies) == LoadCopied(2, 2, 1)


def test_what_runs_ends_in_the_files_that_it_began_in(copies: MemoryCopies, pool: torch.Tensor, tmp_path: Path) -> None:
    copies.store(1, [handle(0, 1)], [slot(0)], urgent=False)
    copies.attach([segment(tmp_path / "new", generation=7)])
    stored = ended(copies)
    assert isinstance(stored, StoreCopied)
    assert SlotFiles([segment(tmp_path / "other")], BLOCK_BYTES).current(slot(0))
    copies.load(2, [handle(1, 1)], [slot(0, generation=7)], stored.checksums)
    assert ended(copies) == LoadCopied(2, 1, 0)  # the new tier has not got it
    assert (tmp_path / "0").read_bytes()[:BLOCK_BYTES] == pool[0].numpy().tobytes()


def test_loads_go_before_stores(pool: torch.Tensor, tmp_path: Path) -> None:
    slow = MemoryCopies(pool, MonotonicClock(), bytes_per_s=BLOCK_BYTES * 20)
    try:
        slow.attach([segment(tmp_path / "0")])
        for job in (1, 2):
            slow.store(job, [handle(0, 1)], [slot(0)], urgent=False)
        slow.store(3, [handle(0, 1)], [slot(0)], urgent=True)
        slow.load(4, [handle(1, 1)], [slot(1)], [0])
        order = [ended(slow).job for _ in range(4)]
        assert order in ([1, 4, 3, 2], [4, 3, 1, 2])
    finally:
        slow.close()


@pytest.mark.parametrize("hurried", [False, True])
def test_what_is_urgent_does_not_wait_for_a_demotion_order_to_end(tmp_path: Path, hurried: bool) -> None:
    pool = torch.zeros((SLOTS, 1 << 20), dtype=torch.uint8)
    content, size = tmp_path / "0", SLOTS << 20
    content.write_bytes(bytes(size + 4 * SLOTS))
    copies = MemoryCopies(pool, MonotonicClock(), bytes_per_s=10 << 20)
    try:
        copies.attach([Segment(str(content), size + 4 * SLOTS, SLOTS, 1 << 20)])
        blocks, slots = [handle(i, 1) for i in range(SLOTS)], [Slot(i) for i in range(SLOTS)]
        copies.store(1, blocks, slots, urgent=False)
        copies.store(2, blocks, slots, urgent=False)
        if hurried:
            copies.hurry(2)
        else:
            copies.store(3, blocks[:1], slots[:1], urgent=True)
        assert copies.rates().out_queue_us == 0  # nothing is measured yet
        first = ended(copies)
        assert first.job == (2 if hurried else 3)
        assert copies.rates().out_queue_us == 0  # the rest is not urgent
        copies.store(4, blocks, slots, urgent=True)
        assert copies.rates().out_queue_us > 0
    finally:
        copies.close()


def test_the_lock_file_has_one_owner(tmp_path: Path) -> None:
    lock = LockFile(tmp_path / "shared" / "executor.lock")
    with pytest.raises(Conflict):
        LockFile(tmp_path / "shared" / "executor.lock")
    lock.close()
    LockFile(tmp_path / "shared" / "executor.lock").close()


def test_lock_files_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    alive = LockFile(tmp_path / "executor-1.lock")
    (tmp_path / "executor-2.lock").touch()
    (tmp_path / "other.lock").touch()
    own = LockFile(tmp_path / "executor-3.lock")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["executor-1.lock", "executor-3.lock", "other.lock"]
    for lock in (alive, own):
        lock.close()
