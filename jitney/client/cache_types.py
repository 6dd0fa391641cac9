"""What a cache says of itself, as plain values, and how they come out of its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jitney.cache.v1 import cache_pb2 as pb
from jitney.client.types import BlockCounts


@dataclass(frozen=True, slots=True)
class Audited:
    """What an audit found; nothing, if all is well."""

    findings: tuple[str, ...]
    checked_blocks: int


@dataclass(frozen=True, slots=True)
class Invalidated:
    """Blocks that cannot be found any more."""

    device_blocks: int
    cpu_blocks: int
    ssd_blocks: int


@dataclass(frozen=True, slots=True)
class ExecutorPool:
    """The device pool of one executor."""

    executor: str
    epoch: int
    blocks: BlockCounts
    requests: int  # that hold, join or own something
    redeclaring: bool  # its blocks are not known yet


@dataclass(frozen=True, slots=True)
class Copies:
    """Between memory and disk."""

    bytes: int = 0
    time_us: int = 0  # in which any such copy was under way
    bytes_per_s: int = 0  # lately; 0: unknown


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One lower tier; counts of blocks are since the start."""

    name: str
    limit_bytes: int
    slot_bytes: int
    slots: int
    used_slots: int
    pinned_slots: int
    retired_slots: int
    hit_tokens: int
    stored_blocks: int
    loaded_blocks: int
    skipped_blocks: int
    dropped_blocks: int
    bad_blocks: int
    evictions: int
    tenant_bytes: Mapping[str, int] = field(default_factory=dict)
    written: Copies = field(default_factory=Copies)
    read: Copies = field(default_factory=Copies)
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """What is open, what the tiers hold, and what it came to. Tokens and blocks are since the start."""

    build: str
    not_ready: str  # empty: ready
    executors: tuple[ExecutorPool, ...]
    hit_tokens: int
    missed_tokens: int
    evictions: int
    unstored_blocks: int  # evicted from a device with no copy below
    scanning: bool  # the SSD is still being read
    tiers: tuple[TierStatus, ...]

    @property
    def hit_rate(self) -> float:
        """Of prompt tokens in whole blocks; 0 of none."""
        tokens = self.hit_tokens + self.missed_tokens
        return self.hit_tokens / tokens if tokens else 0.0


def audited(answer: pb.AuditResponse) -> Audited:
    """Of a message."""
    return Audited(tuple(answer.findings), answer.checked_blocks)


def invalidated(answer: pb.InvalidateResponse) -> Invalidated:
    """Of a message."""
    return Invalidated(answer.device_blocks, answer.cpu_blocks, answer.ssd_blocks)


def cache_status(answer: pb.GetStatusResponse) -> CacheStatus:
    """Of a message."""
    return CacheStatus(
        build=answer.build,
        not_ready=answer.not_ready,
        executors=tuple(_pool(pool) for pool in answer.executors),
        hit_tokens=answer.hit_tokens,
        missed_tokens=answer.missed_tokens,
        evictions=answer.evictions,
        unstored_blocks=answer.unstored_blocks,
        scanning=answer.scanning,
        tiers=tuple(_tier(tier) for tier in answer.tiers),
    )


def _pool(pool: pb.ExecutorStatus) -> ExecutorPool:
    counts = pool.counts
    blocks = BlockCounts(counts.total, counts.free, counts.evictable, counts.leaving, counts.granted)
    return ExecutorPool(pool.executor, pool.epoch, blocks, pool.requests, pool.redeclaring)


def _tier(tier: pb.TierStatus) -> TierStatus:
    return TierStatus(
        name=pb.Tier.Name(tier.tier).removeprefix("TIER_").lower(),
        limit_bytes=tier.limit_bytes,
        slot_bytes=tier.slot_bytes,
        slots=tier.slots,
        used_slots=tier.used_slots,
        pinned_slots=tier.pinned_slots,
        retired_slots=tier.retired_slots,
        hit_tokens=tier.hit_tokens,
        stored_blocks=tier.stored_blocks,
        loaded_blocks=tier.loaded_blocks,
        skipped_blocks=tier.skipped_blocks,
        dropped_blocks=tier.dropped_blocks,
        bad_blocks=tier.bad_blocks,
        evictions=tier.evictions,
        tenant_bytes={tenant.tenant: tenant.bytes for tenant in tier.tenants},
        written=_copies(tier.written),
        read=_copies(tier.read),
        errors={error.name: error.calls for error in tier.errors},
    )


def _copies(moved: pb.Moved) -> Copies:
    return Copies(moved.bytes, moved.time_us, moved.bytes_per_s)
