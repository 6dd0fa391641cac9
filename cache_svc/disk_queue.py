"""The order of work on the SSD: what somebody waits for first, neighbours together, one job a slot at a time.

Lanes: urgent reads, then writes of blocks and of headers, then other reads. Jobs on one disk slot are done in the order
in which they came: a later one is in a lane only when the one before it is done. Not thread-safe: the mover locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cache_svc.disk_jobs import DiskJob, DiskRead
from cache_svc.disk_layout import DiskLayout

URGENT, WRITES, READS = range(3)


class DiskQueue:
    """Jobs to be done."""

    def __init__(self) -> None:
        self._lanes: tuple[dict[int, DiskJob], ...] = ({}, {}, {})  # by disk slot, oldest first
        self._later: dict[int, deque[DiskJob]] = {}  # a slot is here while a job on it is not done

    def __len__(self) -> int:
        return sum(map(len, self._lanes)) + sum(map(len, self._later.values()))

    def can_take(self, *, reads_only: bool) -> bool:
        """Whether `take` would give something."""
        return bool(self._lanes[URGENT] or self._lanes[READS] or (self._lanes[WRITES] and not reads_only))

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
    file_first = oldest - oldest % layout.file_slots
    first = last = oldest
    end = min(file_first + layout.file_slots, oldest + most) - 1
    while last < end and type(waiting.get(last + 1)) is kind:
        last += 1
    start = max(file_first, last + 1 - most)
    while first > start and type(waiting.get(first - 1)) is kind:
        first -= 1
    return [waiting.pop(slot) for slot in range(first, last + 1)]
