"""What the lower tiers hold and did, in blocks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Moved:
    """Of one tier, since the start."""

    hits: int = 0  # loaded to a device: the CPU tier's or the SSD's own
    stores: int = 0  # that came in from above
    loads: int = 0  # that left it upwards
    skipped: int = 0  # that a request could have loaded and did not
    dropped: int = 0  # that should have come in, or gone further down, and were lost for want of room or by a failure
    bad: int = 0  # entries that were not what they should be


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One tier now, and what it did so far. `tenants`: blocks by tenant."""

    slots: int
    used: int
    pinned: int
    retired: int
    evictions: int
    moved: Moved
    tenants: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Both lower tiers. `unstored`: device blocks that were evicted and had no copy below."""

    cpu: TierUsage
    ssd: TierUsage
    unstored: int
