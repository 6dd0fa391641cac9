"""How fast blocks move between device pool, CPU tier and SSD, beside a plain copy and a plain file on the same machine.

    python -m bench.tiers [--mib 512] [--rounds 5] [--dir FOLDER] [--shared-dir FOLDER]

For each block size, in turn, round after round, the same bytes are

- stored from a pool like the executor's into the CPU tier by its copy code, blocks in random order, and loaded back:
  checksums are computed, and compared on the way back. Beside it one `memcpy` of all of it, each way;
- written from the CPU tier to the SSD tier's slots and read back by the cache's own threads: headers and checksums
  included, and compared on the way back. Beside it a plain file: preallocated, direct I/O, sequential, in calls of 4
  MiB, from and into the very slots of the CPU tier: how fast a disk is depends on how scattered the memory's pages are.

`read_from_device` is what the kernel says was really read for it (/proc/self/io), over the bytes of the blocks; without
direct I/O the page cache is dropped first. Ratios are medians over the rounds, of ours over plain in the same round;
the last line is the lowest of all block sizes. FOLDER should be on the disk to be measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import queue
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from bench.common import load_average
from cache_svc.disk_jobs import DiskEntry, DiskJob, DiskRead, DiskWrite, Job
from cache_svc.disk_tier import DiskTier
from cache_svc.index import Content, Origin
from cache_svc.memory_tier import SEGMENT_BYTES, MemoryTier
from cache_svc.mover import DiskReport, Mover
from cache_svc.tier_host import IN_FLIGHT_BYTES
from cache_svc.tiers import TierLimits
from executor_svc.clock import MonotonicClock
from executor_svc.copies import MemoryCopies
from executor_svc.ports import LoadCopied, StoreCopied
from jitney.block_ops import Block
from jitney.keys import Key
from jitney.serving import logs
from jitney.serving.config import default_shared_dir
from jitney.ticket_ops import Slot

BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20)
BLOCK_TOKENS = 16
PLAIN_CALL_BYTES = 4 << 20
COPIED_AT_ONCE = 64

Bytes = NDArray[np.uint8]
MEASURES = ("cpu_store", "cpu_load", "ssd_store", "ssd_load")


@dataclass(frozen=True, slots=True)
class Point:
    """One measure of one block size: GB/s of ours and of the plain way, and their ratio (medians)."""

    block_kib: int
    measure: str
    gb_per_s: float
    plain_gb_per_s: float
    ratio: float
    read_from_device: float
    plain_read_from_device: float


class Rig:
    """Pool, both tiers and the plain file, for one block size."""

    def __init__(self, pool: Bytes, block_bytes: int, folder: Path, shared: Path) -> None:
        self.blocks = len(pool) // block_bytes
        self.size = self.blocks * block_bytes
        self.block_bytes = block_bytes
        self.pool = pool[: self.size].reshape(self.blocks, block_bytes)
        self.order = np.random.default_rng(1).permutation(self.blocks)
        self.memory = MemoryTier(shared, f"bench-{os.getpid()}", (self.blocks + 1) * (block_bytes + 4))
        self.memory.allocate()
        self.memory.lay_out(block_bytes)
        self.tier = mapped(Path(self.memory.segments[0].path))
        self.plain_memory = MemoryTier(shared, f"bench-plain-{os.getpid()}", self.size + (1 << 20))
        self.plain_memory.allocate()
        self.plain_memory.lay_out(self.size)
        self.plain_slots = np.frombuffer(self.plain_memory.view(0), np.uint8)[: self.size]
        slot_bytes = block_bytes + 4096
        self.disk = DiskTier(folder / "ssd", (self.blocks + 2) * slot_bytes + (1 << 20))
        assert self.disk.lay_out(block_bytes, BLOCK_TOKENS) >= self.blocks
        self.reports: queue.SimpleQueue[Sequence[DiskReport]] = queue.SimpleQueue()
        self.mover = Mover(self.disk, self.memory, self.reports.put)
        self.plain = folder / "plain"
        self.file = os.open(self.plain, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.file, 0, self.size)
        self.clock = MonotonicClock()
        self.copies = MemoryCopies(torch.from_numpy(self.pool), self.clock)
        self.copies.attach(self.memory.segments)
        self.checksums: list[int] = []

    def close(self) -> None:
        """Removes everything."""
        self.mover.close(0.0)
        self.disk.close()
        os.close(self.file)
        self.plain.unlink()
        for path in self.disk_files():
            path.unlink()
        self.copies.close()
        del self.copies, self.plain_slots
        self.memory.close()
        self.plain_memory.close()

    def disk_files(self) -> list[Path]:
        """Of the SSD tier."""
        return sorted(self.plain.parent.glob("ssd/*.kv"))

    # Ours.

    def cpu_store(self) -> None:
        """Pool to CPU tier."""
        parts = self._parts()
        for number, (blocks, slots) in enumerate(parts):
            self.copies.store(number, blocks, slots, urgent=False)
        self.checksums = []
        for _ in parts:
            copied = self._copied()
            assert isinstance(copied, StoreCopied)
            self.checksums += copied.checksums

    def cpu_load(self) -> None:
        """CPU tier to pool, checksums compared."""
        parts = self._parts()
        for number, (blocks, slots) in enumerate(parts):
            at = number * COPIED_AT_ONCE
            self.copies.load(number, blocks, slots, self.checksums[at : at + COPIED_AT_ONCE])
        for _ in parts:
            copied = self._copied()
            assert isinstance(copied, LoadCopied) and copied.good == copied.blocks

    def _parts(self) -> list[tuple[list[Block], list[Slot]]]:
        """Blocks in random order and slots in rising order, by tickets."""
        return [
            ([Block(int(block)) for block in self.order[at : at + COPIED_AT_ONCE]], [Slot(slot) for slot in slots])
            for at in range(0, self.blocks, COPIED_AT_ONCE)
            if (slots := range(at, min(at + COPIED_AT_ONCE, self.blocks)))
        ]

    def _copied(self) -> StoreCopied | LoadCopied:
        while (copied := self.copies.poll()) is None:
            self.clock.wait(None)
        return copied

    def ssd_store(self) -> None:
        """CPU tier to SSD."""
        self._do([DiskWrite(Job(slot), Slot(slot), slot, entry) for slot, entry in enumerate(self.entries)])

    def ssd_load(self) -> None:
        """SSD to CPU tier, headers and checksums compared."""
        self._do([DiskRead(Job(slot), slot, Slot(slot), entry, True) for slot, entry in enumerate(self.entries)])

    @functools.cached_property
    def entries(self) -> list[DiskEntry]:
        """Of the slots, once something is in them."""
        content = Content(bytes(4 * BLOCK_TOKENS), Origin("tenant", bytes(32), "model"))
        keys = [Key(slot.to_bytes(32, "little")) for slot in range(self.blocks)]
        sums = self.checksums
        return [DiskEntry(key, key, content, b"fingerprint", sums[at], True) for at, key in enumerate(keys)]

    def _do(self, jobs: Sequence[DiskJob]) -> None:
        """As the cache does it: as many jobs are given as reports have come."""
        room, at, left = max(TierLimits().disk_jobs_in_flight, IN_FLIGHT_BYTES // self.block_bytes), 0, len(jobs)
        while left:
            if room and at < len(jobs):
                self.mover.submit(jobs[at : at + room])
                at, room = at + room, 0
            reports = self.reports.get()
            assert all(report.ok for report in reports)
            room += len(reports)
            left -= len(reports)

    # Plain.

    def plain_cpu_store(self) -> None:
        """One copy of all."""
        np.copyto(self.plain_slots, self.pool.reshape(-1))

    def plain_cpu_load(self) -> None:
        """And back."""
        np.copyto(self.pool.reshape(-1), self.plain_slots)

    def plain_ssd_store(self) -> None:
        """A file, from its start to its end."""
        for at in range(0, self.size, PLAIN_CALL_BYTES):
            os.pwritev(self.file, [self.tier[at : at + PLAIN_CALL_BYTES]], at)

    def plain_ssd_load(self) -> None:
        """And back."""
        for at in range(0, self.size, PLAIN_CALL_BYTES):
            os.preadv(self.file, [self.tier[at : at + PLAIN_CALL_BYTES]], at)


def mapped(path: Path) -> memoryview:
    """The bytes of a file, as whoever shares it sees them."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


def device_bytes() -> int:
    """Bytes that this process had read from block devices so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def timed(action: Callable[[], None], size: int) -> tuple[float, float]:
    """Bytes a second, and bytes read from the device over `size`."""
    read, began = device_bytes(), perf_counter()
    action()
    seconds = perf_counter() - began
    return size / seconds, (device_bytes() - read) / size


def measure(pool: Bytes, block_bytes: int, folder: Path, shared: Path, rounds: int) -> list[Point]:
    """All measures of one block size; the first round warms up."""
    rig = Rig(pool, block_bytes, folder, shared)
    digest = xxhash.xxh3_64_intdigest(rig.pool)  # type: ignore[arg-type]  # any buffer
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in MEASURES}
    for number in range(rounds + 1):
        for name in MEASURES:
            plain: Callable[[], None] = getattr(rig, f"plain_{name}")
            ours: Callable[[], None] = getattr(rig, name)
            before = timed(plain, rig.size) if number % 2 else None
            result = timed(ours, rig.size)
            after = before or timed(plain, rig.size)
            if number:
                found[name].append((*result, *after))
    assert xxhash.xxh3_64_intdigest(rig.pool) == digest  # type: ignore[arg-type]
    rig.close()
    return [
        Point(
            block_bytes >> 10,
            name,
            round(statistics.median(each[0] for each in figures) / 1e9, 2),
            round(statistics.median(each[2] for each in figures) / 1e9, 2),
            round(statistics.median(each[0] / each[2] for each in figures), 3),
            round(statistics.median(each[1] for each in figures), 3),
            round(statistics.median(each[3] for each in figures), 3),
        )
        for name, figures in found.items()
    ]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="in all, each way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("bench/results"), help="on the disk to be measured")
    parser.add_argument("--shared-dir", type=Path, default=default_shared_dir(), help="of the CPU tier")
    options = parser.parse_args()
    assert options.mib << 20 < SEGMENT_BYTES, "the plain copy wants one segment"
    logs.configure("bench", "warning")
    options.dir.mkdir(parents=True, exist_ok=True)
    room = mmap.mmap(-1, options.mib << 20)
    room.madvise(mmap.MADV_HUGEPAGE)
    pool = np.frombuffer(room, np.uint8)
    pool[:] = np.frombuffer(np.random.default_rng(0).bytes(len(pool)), np.uint8)
    print(f"{options.mib} MiB a round, {options.rounds} rounds; {load_average()}")
    print(f"{'block':>9}  {'':10} {'GB/s':>7} {'plain':>7} {'ratio':>7}   read from the device: ours, plain")
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="jitney-bench-", dir=options.dir) as folder:
        for block_bytes in BLOCK_BYTES:
            for point in measure(pool, block_bytes, Path(folder), options.shared_dir, options.rounds):
                points.append(point)
                print(
                    f"{point.block_kib:>5} KiB  {point.measure:10} {point.gb_per_s:7.2f} {point.plain_gb_per_s:7.2f} "
                    f"{point.ratio:7.3f}   {point.read_from_device:.3f}, {point.plain_read_from_device:.3f}"
                )
    print(
        json.dumps(
            {f"{name}_ratio": min(point.ratio for point in points if point.measure == name) for name in MEASURES}
        )
    )


if __name__ == "__main__":
    main()
