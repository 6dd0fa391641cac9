"""Copies on streams of a device: nothing is told before it is so, and a block in flight is used by nobody else.

The streams are emulated: what is started on them arrives late, and in two halves.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from executor_svc.attention import Event
from executor_svc.clock import MonotonicClock
from executor_svc.copies import SlotFiles
from executor_svc.copies_device import DeviceCopies
from executor_svc.copies_guard import BlockInFlight, InUse
from executor_svc.copies_streams import EmulatedStreams, Pair
from executor_svc.ports import LoadCopied, StoreCopied
from jitney.block_ops import Segment, handle
from jitney.ticket_ops import Slot
from tests.support.step_plans import Chunk, Sequences

BLOCKS, SLOTS = 12, 10


def segment(path: Path, slot_bytes: int, generation: int = 1) -> Segment:
    size = SLOTS * slot_bytes
    path.write_bytes(bytes(size) + np.full(SLOTS, generation, "<u4").tobytes())
    return Segment(str(path), size + 4 * SLOTS, SLOTS, slot_bytes)


def slot(number: int, generation: int = 1) -> Slot:
    return Slot(generation << 32 | number)


class CountedStreams(EmulatedStreams):
    """What was started, and in which order."""

    def __init__(self, pool: torch.Tensor, in_use: InUse, delay_s: float) -> None:
        super().__init__(pool, in_use, delay_s)
        self.copies: list[tuple[bool, int]] = []  # direction, blocks
        self.registering = threading.Event()
        self.registering.set()

    def register(self, files: SlotFiles) -> None:
        self.registering.wait()

    def start(self, pairs: Sequence[Pair], inward: bool) -> Event:
        self.copies += [(inward, len(source)) for source, _ in pairs]
        return super().start(pairs, inward)


class Rig:
    """A pool, two segments, and copies between them."""

    def __init__(self, folder: Path, block_bytes: int, slot_bytes: int, delay_s: float = 0.002) -> None:
        self.block_bytes = block_bytes
        self.pool = torch.randint(0, 256, (BLOCKS, block_bytes), dtype=torch.uint8)
        self.in_use = InUse()
        self.streams = CountedStreams(self.pool, self.in_use, delay_s)
        self.copies = DeviceCopies(self.pool, MonotonicClock(), self.streams)
        self.folder = folder
        self.segments = [segment(folder / str(number), slot_bytes) for number in (0, 1)]
        self.copies.attach(self.segments)
        self.files = SlotFiles(self.segments, block_bytes)

    def ended(self) -> StoreCopied | LoadCopied:
        while (found := self.copies.poll()) is None:
            time.sleep(0.0005)
        return found

    def slot_bytes(self, number: int) -> bytes:
        return self.files.rows.block(number).tobytes()


@pytest.fixture(params=[(5000, 8192), (4096, 4096), (100, 4096)], ids=["apart", "adjacent", "small"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, *request.param)
    yield rig
    rig.copies.close()


def test_blocks_go_and_come_back(rig: Rig) -> None:
    slots = [slot(14), slot(0), slot(1)]
    rig.copies.store(1, [handle(2, 1), handle(3, 1), handle(4, 9)], slots, urgent=False)
    stored = rig.ended()
    assert isinstance(stored, StoreCopied)
    assert stored.checksums == [xxhash.xxh3_64_intdigest(rig.pool[i].numpy().tobytes()) for i in (2, 3, 4)]
    wanted = rig.pool[2:5].clone()
    rig.copies.load(2, [handle(5, 1), handle(7, 1), handle(8, 2)], slots, stored.checksums)
    assert rig.ended() == LoadCopied(2, 3, 3)
    assert torch.equal(rig.pool[[5, 7, 8]], wanted)
    joined = rig.block_bytes == 4096
    assert rig.streams.copies == ([(False, 1), (False, 2)] if joined else [(False, 1)] * 3) + (
        [(True, 1), (True, 2)] if joined else [(True, 1)] * 3
    )
    assert rig.copies.rates().to_host_bytes_per_s > 0
    assert rig.copies.rates().to_device_bytes_per_s > 0


def test_a_slot_that_was_given_away_is_no_good(rig: Rig) -> None:
    rig.copies.load(1, [handle(i, 1) for i in range(4)], [slot(0), slot(1), slot(13, generation=2), slot(3)], [0] * 4)
    assert rig.ended() == LoadCopied(1, 4, 2)


def test_what_runs_ends_in_the_files_that_it_began_in(rig: Rig) -> None:
    rig.copies.store(1, [handle(0, 1)], [slot(0)], urgent=False)
    rig.copies.attach([segment(rig.folder / "new", 8192, generation=7)])
    stored = rig.ended()
    assert isinstance(stored, StoreCopied)
    assert rig.slot_bytes(0) == rig.pool[0].numpy().tobytes()
    rig.copies.load(2, [handle(1, 1)], [slot(0, generation=7)], stored.checksums)
    assert rig.ended() == LoadCopied(2, 1, 1)
    assert not rig.pool[1].any()  # the new tier has other bytes


def test_jobs_wait_until_the_tier_is_registered(rig: Rig) -> None:
    rig.streams.registering.clear()
    rig.copies.attach(rig.segments)
    rig.copies.store(1, [handle(0, 1)], [slot(0)], urgent=True)
    time.sleep(0.01)
    assert rig.copies.poll() is None and not rig.streams.copies
    rig.streams.registering.set()
    assert rig.ended().job == 1


def test_what_is_urgent_goes_before_the_rest_of_what_is_not(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 3 << 20, 3 << 20, delay_s=0.0)
    try:
        rig.streams.registering.clear()
        rig.copies.attach(rig.segments)  # nothing begins before all are ordered
        blocks, slots = [handle(i, 1) for i in range(8)], [slot(i) for i in range(8)]
        rig.copies.store(1, blocks, slots, urgent=False)
        rig.copies.store(2, blocks, [slot(10 + i) for i in range(8)], urgent=False)
        rig.copies.store(3, blocks[:1], [slot(9)], urgent=True)
        rig.copies.store(4, blocks, [slot(10 + i) for i in range(8)], urgent=False)
        rig.copies.hurry(4)
        rig.copies.load(5, [handle(11, 1)], [slot(19)], [0])
        rig.streams.registering.set()
        ends = [rig.ended().job for _ in range(5)]
        assert [job for job in ends if job != 5] == [3, 4, 1, 2]
    finally:
        rig.copies.close()


def test_no_end_is_told_while_a_piece_may_still_write(tmp_path: Path) -> None:
    """Also of a load that went wrong early: its last piece has arrived, too, when that is told."""
    rig = Rig(tmp_path, 3 << 20, 3 << 20, delay_s=0.01)
    try:
        bad = [slot(0, generation=2), *(slot(i) for i in range(1, 6))]
        rig.copies.load(1, [handle(i, 1) for i in range(6)], bad, [0] * 6)
        assert rig.ended() == LoadCopied(1, 6, 0)
        rig.in_use.begin("whoever has them next", (), range(6))
        rig.pool[:6] = 77
        time.sleep(0.05)
        assert (rig.pool[:6] == 77).all()
    finally:
        rig.copies.close()


def test_many_jobs_each_way_move_what_they_should(rig: Rig) -> None:
    """Random orders over a pool half of which is stored from and half loaded to; each end is checked when it comes."""
    rng = random.Random(3)
    expected: dict[int, tuple[list[int], list[int]]] = {}
    free_blocks, free_slots = list(range(6, BLOCKS)), list(range(10, 20))
    before = [rig.pool[i].numpy().tobytes() for i in range(BLOCKS)]
    for number in range(10, 20):
        rig.files.rows.block(number)[:] = number
    for job in range(40):
        if rng.random() < 0.5:
            count = rng.randint(1, 3)
            blocks, slots = rng.sample(range(6), count), rng.sample(range(10), count)
            if not any(set(slots) & set(other) for _, other in expected.values()):
                expected[job] = blocks, slots
                handles = [handle(i, 1) for i in blocks]
                rig.copies.store(job, handles, [slot(i) for i in slots], urgent=rng.random() < 0.5)
        elif free_blocks:
            count = rng.randint(1, min(3, len(free_blocks)))
            blocks, slots = [free_blocks.pop() for _ in range(count)], rng.sample(free_slots, count)
            expected[job] = blocks, slots
            rig.copies.load(job, [handle(i, 1) for i in blocks], [slot(i) for i in slots], [0] * count)
        if expected and rng.random() < 0.7:
            end = rig.ended()
            blocks, slots = expected.pop(end.job)
            if isinstance(end, StoreCopied):
                assert [rig.slot_bytes(i) for i in slots] == [before[i] for i in blocks]
                assert end.checksums == [xxhash.xxh3_64_intdigest(before[i]) for i in blocks]
            else:
                assert [set(rig.pool[i].tolist()) for i in blocks] == [{i} for i in slots]
                rig.pool[blocks] = 0
                free_blocks += blocks
    while expected:
        del expected[rig.ended().job]


def test_the_fault_of_a_copy_is_raised_where_its_end_is_asked_for(rig: Rig) -> None:
    rig.in_use.begin("somebody", (), (3,))
    rig.copies.store(1, [handle(3, 1)], [slot(0)], urgent=True)
    with pytest.raises(BlockInFlight, match=r"\[3\]"):
        rig.ended()


def test_the_guard_finds_a_block_that_is_used_in_flight() -> None:
    sequences = Sequences(2, 32)
    plan = sequences.plan([Chunk(0, [1] * 16, 0), Chunk(1, [1], 3, write=False)])
    written, read, other = int(sequences.table[0, 0]), int(sequences.table[1, 0]), int(sequences.table[1, 1])
    for blocks, inward, faulty in (
        ((written,), True, True),
        ((written,), False, True),
        ((read,), True, True),
        ((read,), False, False),
        ((other,), True, False),
    ):
        for step_first in (True, False):
            in_use = InUse()
            copy = ((), blocks) if inward else (blocks, ())

            def both(first: bool, in_use: InUse = in_use, copy: tuple[tuple[int, ...], ...] = copy) -> None:
                if first:
                    with in_use.step(plan, 16):
                        in_use.begin("a copy", *copy)
                else:
                    in_use.begin("a copy", *copy)
                    with in_use.step(plan, 16):
                        pass

            if faulty:
                with pytest.raises(BlockInFlight):
                    both(step_first)
            else:
                both(step_first)
    in_use = InUse()
    with in_use.step(plan, 16):
        pass
    in_use.begin("a copy", (), (written,))
    in_use.end((), (written,))
    with in_use.step(plan, 16):
        pass
