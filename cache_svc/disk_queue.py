"""The order of work on the SSD: what somebody waits for first, neighbours together, one job a slot at a time.

Lanes: urgent reads, then writes and erasures, then other reads. Jobs on one disk slot are done in the order in which
they came: a later one is in a lane only when the one before it is done. Not thread-safe: the mover locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cache_svc.disk_jobs import DiskErase, DiskJob, DiskRead, DiskWrite
from cache_svc.disk_layout import DiskLayout

URGENT, WRITES, READS = range(3)


class DiskQueue:
    """Jobs to be done."""

    def __init__(self) -> None:
        self._lanes: tuple[dict[int, DiskJob], ...] = ({}, {}, {})  # by disk slot, oldest first
        self._later: dict[int, deque[DiskJob]] = {}  # a slot is here while a job on it is not done

    def __len__(self) -> int:
        return sum(map(len, self._lanes)) + sum(map(len, self._later.values()))

    def add(self, job: DiskJob) -> None:
        """Behind those of its lane, and of its slot."""
        later = self._later.get(job.disk_slot)
        if later is not None:
            later.append(job)
            return
        self._later[job.disk_slot] = deque()
        self._enter(job)

    def take(self, layout: DiskLayout, most: int, *, reads_only: bool) -> Sequence[DiskJob]:
        """The next jobs: of one kind, on consecutive slots of one file, at most so many; none if nothing waits."""
        for lane in (URGENT, READS) if reads_only else (URGENT, WRITES, READS):
            if waiting := self._lanes[lane]:
                return _run(waiting, layout, most)
        return ()

    def done(self, slot: int) -> None:
        """A job on that slot is done: the next one may be taken."""
        later = self._later[slot]
        if later:
            self._enter(later.popleft())
        else:
            del self._later[slot]

    def drop_reads(self) -> None:
        """Forgets the reads that were not begun."""
        for slot, later in self._later.items():
            self._later[slot] = deque(job for job in later if not isinstance(job, DiskRead))
        slots = [*self._lanes[URGENT], *self._lanes[READS]]
        self._lanes[URGENT].clear()
        self._lanes[READS].clear()
        for slot in slots:
            self.done(slot)

    def _enter(self, job: DiskJob) -> None:
        lane = WRITES if not isinstance(job, DiskRead) else URGENT if job.urgent else READS
        self._lanes[lane][job.disk_slot] = job


def _run(waiting: dict[int, DiskJob], layout: DiskLayout, most: int) -> list[DiskJob]:
    """The oldest job, with waiting neighbours of its kind on both sides."""
    oldest = next(iter(waiting))
    kind = type(waiting[oldest])
    number, _ = layout.place(oldest)
    first, last = oldest, oldest
    while last - first + 1 < most and _fits(waiting, last + 1, kind, layout, number):
        last += 1
    while last - first + 1 < most and _fits(waiting, first - 1, kind, layout, number):
        first -= 1
    return [waiting.pop(slot) for slot in range(first, last + 1)]


def _fits(
    waiting: dict[int, DiskJob],
    slot: int,
    kind: type[DiskRead | DiskWrite | DiskErase],
    layout: DiskLayout,
    number: int,
) -> bool:
    return isinstance(waiting.get(slot), kind) and layout.place(slot)[0] == number
