"""Blocks for the lower tiers' tests: entries with real keys and checksums, a disk that fails at will, a mover's rig."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from cache_svc.disk_calls import DiskCalls
from cache_svc.disk_jobs import DiskEntry, DiskHeader, DiskJob, DiskRead, DiskWrite, Job
from cache_svc.disk_tier import DiskTier
from cache_svc.index import Content, Origin
from cache_svc.memory_tier import MemoryTier
from cache_svc.mover import DiskReport, Mover, Outcome
from jitney.keys import Root, chain, salt_digest
from jitney.ticket_ops import Slot
from tests.support.processes import wait_until

BLOCK_BYTES = 9000  # No whole number of pages.
BLOCK_TOKENS = 4


def payload(number: int, size: int = BLOCK_BYTES) -> bytes:
    """The bytes of block `number`."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()


def entry(number: int, *, tenant: str = "default", data: bytes | None = None) -> DiskEntry:
    """Block `number`, the only one of its chain."""
    root = Root(salt="", model_version="model").key()
    tokens = np.full(BLOCK_TOKENS, number, np.int32)
    return DiskEntry(
        key=chain(root, tokens, BLOCK_TOKENS)[0],
        parent=root,
        content=Content(tokens.astype("<i4").tobytes(), Origin(tenant, salt_digest(""), "model")),
        fingerprint=b"fingerprint",
        checksum=xxhash.xxh3_64_intdigest(payload(number) if data is None else data),
        place=number % 2 == 0,
    )


class FailingDisk(DiskCalls):
    """Real calls, until `fails` has an errno for them ("open", "allocate", "read", "write"); each waits `delay_s`.

    `switch` is a file with such words, "write=ENOSPC read=EIO delay=0.1": for a process that a test started. While it
    says "hold", calls wait.
    """

    def __init__(self, switch: Path | None = None) -> None:
        self.fails: dict[str, int] = {}
        self.delay_s = 0.0
        self.calls: list[tuple[str, int]] = []
        self._switch = switch

    def open(self, path: Path, *, direct: bool) -> int:
        self._may_fail("open", 0)
        return super().open(path, direct=direct)

    def allocate(self, file: int, start: int, size: int) -> None:
        self._may_fail("allocate", size)
        super().allocate(file, start, size)

    def read(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._may_fail("read", sum(map(len, buffers)))
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._may_fail("write", sum(map(len, buffers)))
        return super().write(file, buffers, offset)

    def _may_fail(self, call: str, size: int) -> None:
        self.calls.append((call, size))
        if self._switch is not None:
            while (words := self._words(self._switch)) == "hold":
                time.sleep(0.01)
            self._obey(words)
        if self.delay_s:
            time.sleep(self.delay_s)
        if call in self.fails:
            raise OSError(self.fails[call], os.strerror(self.fails[call]))

    @staticmethod
    def _words(switch: Path) -> str:
        return switch.read_text(encoding="ascii") if switch.exists() else ""

    def _obey(self, words: str) -> None:
        said = dict(word.split("=") for word in words.split())
        self.delay_s = float(said.pop("delay", 0))
        self.fails = {call: int(getattr(errno, name)) for call, name in said.items()}


class TierRig:
    """Both lower tiers with their mover, as a context; jobs are numbered and waited for."""

    def __init__(
        self,
        folder: Path,
        *,
        cpu_slots: int = 8,
        limit_bytes: int = 1 << 20,
        file_bytes: int = 1 << 18,
        calls: DiskCalls | None = None,
    ) -> None:
        self.directory = folder / "ssd"
        self.memory = MemoryTier(folder / "shared", f"{os.getpid()}-{time.monotonic_ns()}", cpu_slots * 12296 + 4096)
        self.memory.allocate()
        self.memory.lay_out(BLOCK_BYTES)
        self.clock_s = 0.0
        self.disk = DiskTier(
            self.directory, limit_bytes, file_bytes=file_bytes, calls=calls, clock=lambda: self.clock_s
        )
        self.disk.claim()
        self.found = dict(self.disk.scan(lambda: False))
        self.slots = self.disk.lay_out(BLOCK_BYTES, BLOCK_TOKENS)
        self.reports: list[DiskReport] = []
        self._lock = threading.Lock()
        self._next = 0
        self.mover = Mover(self.disk, self.memory, self._reported)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.mover.close(5.0)
        self.disk.close()
        self.memory.close()

    def fill(self, cpu_slot: int, data: bytes) -> None:
        """Puts bytes into a slot of the CPU tier."""
        self.memory.view(cpu_slot)[: len(data)] = data

    def do(self, *jobs: DiskJob) -> list[Outcome]:
        """Has the jobs done; what became of each."""
        with self._lock:
            self.reports.clear()
        self.mover.submit(jobs)
        wait_until(lambda: len(self.reports) == len(jobs))
        became = {report.job.job: report.outcome for report in self.reports}
        return [became[job.job] for job in jobs]

    def write(self, number: int, disk_slot: int, cpu_slot: int = 0) -> DiskWrite:
        """A job that writes block `number`."""
        return DiskWrite(self._job(), Slot(cpu_slot), disk_slot, entry(number))

    def read(self, number: int, disk_slot: int, cpu_slot: int = 0, *, urgent: bool = True) -> DiskRead:
        """A job that reads block `number`."""
        return DiskRead(self._job(), disk_slot, Slot(cpu_slot), entry(number), urgent)

    def erase(self, disk_slot: int) -> DiskHeader:
        """A job that erases a slot."""
        return DiskHeader(self._job(), disk_slot, None)

    def mark(self, number: int, disk_slot: int) -> DiskHeader:
        """A job that says of block `number` there that a hit may end behind it."""
        return DiskHeader(self._job(), disk_slot, replace(entry(number), place=True))

    def store(self, *numbers: int) -> list[Outcome]:
        """Writes blocks, each to the disk slot of its own number."""
        outcomes = []
        for number in numbers:
            self.fill(0, payload(number))
            outcomes += self.do(self.write(number, number))
        return outcomes

    def load(self, number: int, disk_slot: int | None = None) -> Outcome:
        """Reads a block; if it is said to be good, it is."""
        self.fill(1, bytes(BLOCK_BYTES))
        (outcome,) = self.do(self.read(number, number if disk_slot is None else disk_slot, 1))
        if outcome is Outcome.OK:
            assert bytes(self.memory.view(1)[:BLOCK_BYTES]) == payload(number)
        return outcome

    def files(self) -> list[Path]:
        """Of the SSD tier."""
        return sorted(self.directory.glob("*.kv"))

    def _job(self) -> Job:
        self._next += 1
        return Job(self._next)

    def _reported(self, reports: Sequence[DiskReport]) -> None:
        with self._lock:
            self.reports += reports


def disk_usage(folder: Path) -> int:
    """As `du` counts it: bytes on the disk, the directory included; 0 if it is not there."""
    total = 0
    for path in (folder, *folder.rglob("*")):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total
