"""What the state machine of the lower tiers wants done with the SSD; threads do it and report back by job number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from cache_svc.index import Content
from jitney.keys import Key
from jitney.ticket_ops import Slot

Job = NewType("Job", int)


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """A block on the SSD, as its header says. `place`: a hit may end behind it. `checksum`: xxh3_64 of the bytes."""

    key: Key
    parent: Key
    content: Content
    fingerprint: bytes
    checksum: int
    place: bool


@dataclass(frozen=True, slots=True)
class DiskWrite:
    """Write the CPU slot's bytes and a header into slot number `disk_slot`. The CPU slot is pinned meanwhile."""

    job: Job
    cpu_slot: Slot
    disk_slot: int
    entry: DiskEntry


@dataclass(frozen=True, slots=True)
class DiskRead:
    """Read slot number `disk_slot` into the CPU slot; header and checksum must be the entry's. `urgent`: a request
    waits for it."""

    job: Job
    disk_slot: int
    cpu_slot: Slot
    entry: DiskEntry
    urgent: bool


@dataclass(frozen=True, slots=True)
class DiskHeader:
    """Write only the header of slot number `disk_slot` anew, so that a restart finds its entry as it is by now, or
    None: nothing there. No report is needed."""

    job: Job
    disk_slot: int
    entry: DiskEntry | None


DiskJob = DiskWrite | DiskRead | DiskHeader
