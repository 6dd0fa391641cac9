"""The threads between CPU tier and SSD: order, joined neighbours, rates."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

from cache_svc.disk_jobs import DiskJob, DiskRead
from cache_svc.disk_layout import DiskLayout
from cache_svc.disk_queue import DiskQueue
from cache_svc.mover import Outcome
from cache_svc.throughput import WINDOW_S, Throughput
from tests.support.tier_bytes import BLOCK_BYTES, FailingDisk, TierRig, payload

OK = Outcome.OK
LAYOUT = DiskLayout(BLOCK_BYTES, 4096, 15, 30)


class Gate(FailingDisk):
    """A disk whose calls wait until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def read(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.gate.wait(30)
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.gate.wait(30)
        return super().write(file, buffers, offset)


def jobs(rig: TierRig) -> tuple[DiskJob, ...]:
    return (
        rig.read(20, 20, urgent=False),
        rig.write(4, 4),
        rig.write(3, 3),
        rig.read(8, 8),
        rig.erase(5),
        rig.read(7, 7),
        rig.write(2, 2),
    )


def test_urgent_reads_come_first_and_neighbours_together(tmp_path: Path) -> None:
    queue = DiskQueue()
    with TierRig(tmp_path) as rig:
        for job in jobs(rig):
            queue.add(job)
    order = []
    while run := queue.take(LAYOUT, 8, reads_only=False):
        order.append([job.disk_slot for job in run])
        for job in run:
            queue.done(job.disk_slot)
    assert order == [[7, 8], [2, 3, 4], [5], [20]]


def test_a_thread_for_reads_takes_nothing_else(tmp_path: Path) -> None:
    queue = DiskQueue()
    with TierRig(tmp_path) as rig:
        for job in jobs(rig):
            queue.add(job)
    taken = [[job.disk_slot for job in queue.take(LAYOUT, 8, reads_only=True)] for _ in range(3)]
    assert taken == [[7, 8], [20], []]
    assert len(queue) == 4


def test_runs_end_at_their_size_and_at_the_end_of_a_file(tmp_path: Path) -> None:
    queue = DiskQueue()
    with TierRig(tmp_path) as rig:
        for slot in (13, 14, 15, 16, 17):
            queue.add(rig.read(slot, slot))
    assert [job.disk_slot for job in queue.take(LAYOUT, 8, reads_only=False)] == [13, 14]
    assert [job.disk_slot for job in queue.take(LAYOUT, 2, reads_only=False)] == [15, 16]


def test_jobs_on_one_slot_keep_their_order(tmp_path: Path) -> None:
    queue = DiskQueue()
    with TierRig(tmp_path) as rig:
        wanted: list[DiskJob] = [rig.write(1, 1), rig.erase(1), rig.write(2, 1), rig.read(2, 1)]
    for job in wanted:
        queue.add(job)
    for job in wanted:
        assert list(queue.take(LAYOUT, 8, reads_only=False)) == [job]
        assert not queue.take(LAYOUT, 8, reads_only=False)
        queue.done(1)
    assert len(queue) == 0


def test_many_jobs_at_once_come_out_right(tmp_path: Path) -> None:
    disk = Gate()
    with TierRig(tmp_path, cpu_slots=20, calls=disk) as rig:
        for number in range(20):
            rig.fill(number, payload(number))
        disk.gate.clear()
        threading.Timer(0.2, disk.gate.set).start()
        assert rig.do(*(rig.write(number, number, number) for number in range(20))) == [OK] * 20
        sizes = [size for call, size in disk.calls if call == "write"]
        assert len(sizes) < 10  # of 20
        for number in range(20):
            rig.fill(number, bytes(BLOCK_BYTES))
        assert rig.do(*(rig.read(number, number, 19 - number) for number in range(20))) == [OK] * 20
        for number in range(20):
            assert bytes(rig.memory.view(19 - number)[:BLOCK_BYTES]) == payload(number)
        status = rig.mover.status()
        assert status.read_bytes == status.written_bytes == 20 * BLOCK_BYTES
        assert status.read_bytes_per_s > 0 and status.write_bytes_per_s > 0
        assert status.outcomes == {OK: 40}


def test_a_header_without_room_is_dropped_and_its_neighbours_are_written(tmp_path: Path) -> None:
    with TierRig(tmp_path) as rig:
        rig.fill(0, payload(1))
        writes = [rig.write(1, slot) for slot in (1, 2, 3)]
        content = writes[1].entry.content
        origin = dataclasses.replace(content.origin, tenant="t" * 5000)
        long = dataclasses.replace(writes[1].entry, content=dataclasses.replace(content, origin=origin))
        writes[1] = dataclasses.replace(writes[1], entry=long)
        assert rig.do(*writes) == [OK, Outcome.DROPPED, OK]
        assert [rig.load(1, slot) for slot in (1, 2, 3)] == [OK, Outcome.BAD, OK]


def test_closing_writes_what_is_queued_and_drops_the_reads(tmp_path: Path) -> None:
    disk = Gate()
    with TierRig(tmp_path, calls=disk) as rig:
        rig.store(1)
        rig.fill(0, payload(5))
        disk.gate.clear()
        rig.reports.clear()
        rig.mover.submit([*(rig.read(1, 1) for _ in range(5)), *(rig.write(5, slot) for slot in (10, 20, 30))])
        threading.Timer(0.2, disk.gate.set).start()
        rig.mover.close(20.0)
        written = [report.job.disk_slot for report in rig.reports if not isinstance(report.job, DiskRead)]
        assert sorted(written) == [10, 20, 30]
        assert len(rig.reports) < 8
    with TierRig(tmp_path) as rig:
        assert sorted(rig.found) == [1, 10, 20, 30]


def test_rates_are_of_the_time_in_which_anything_ran() -> None:
    rate = Throughput()
    assert rate.bytes_per_s == 0
    rate.began(0.0)
    rate.began(0.5)
    rate.ended(1.0, 100)
    rate.ended(2.0, 100)
    rate.began(10.0)
    rate.ended(11.0, 100)
    assert rate.bytes_per_s == 100
    assert (rate.total_bytes, rate.total_s) == (300, 3.0)
    rate.began(20.0)
    rate.ended(20.0 + 100 * WINDOW_S, 0)
    assert rate.bytes_per_s == 100
    for second in range(100, 130):
        rate.began(second)
        rate.ended(second + 1, 1000)
    assert 900 < rate.bytes_per_s <= 1000
