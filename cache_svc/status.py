"""What the cache says of itself: GetStatus."""

from __future__ import annotations

import functools
import importlib.metadata

from cache_svc.epochs import Epochs
from cache_svc.mover import MoverStatus
from cache_svc.tier_host import TierHost
from cache_svc.tier_usage import TierUsage
from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache_codec import encode_counts


def status(epochs: Epochs, host: TierHost, not_ready: str) -> pb.GetStatusResponse:
    """All executors, and all tiers."""
    response = pb.GetStatusResponse(boot_id=epochs.boot_id, build=_build(), not_ready=not_ready, scanning=host.scanning)
    for name, session in epochs.sessions.items():
        ledger = session.ledger
        response.executors.add(
            executor=name,
            incarnation=session.pool.incarnation,
            epoch=session.epoch,
            counts=encode_counts(ledger.blocks.counts()),
            op_seq=session.op_seq,
            redeclaring=session.redeclaring,
            requests=len(ledger.requests),
        )
        response.hit_tokens += ledger.hit_blocks * session.pool.block_tokens
        response.missed_tokens += ledger.missed_blocks * session.pool.block_tokens
        response.evictions += ledger.blocks.evicted
    _add_tiers(response, host)
    return response


def _add_tiers(response: pb.GetStatusResponse, host: TierHost) -> None:
    tiers, memory, disk = host.tiers, host.memory, host.disk
    if tiers is None or memory is None or host.geometry is None:
        return
    usage = tiers.usage()
    block_bytes, block_tokens = host.geometry
    response.unstored_blocks = usage.unstored
    cpu = _tier(pb.TIER_CPU, usage.cpu, block_bytes, block_tokens)
    cpu.limit_bytes, cpu.slot_bytes = host.settings.cpu_bytes, memory.slot_bytes
    response.tiers.append(cpu)
    if disk is not None and disk.layout is not None:
        ssd = _tier(pb.TIER_SSD, usage.ssd, block_bytes, block_tokens)
        ssd.limit_bytes, ssd.slot_bytes = host.settings.ssd_bytes, disk.layout.slot_bytes
        if host.mover is not None:
            _add_moved(ssd, host.mover.status())
        response.tiers.append(ssd)


def _tier(tier: pb.Tier, usage: TierUsage, block_bytes: int, block_tokens: int) -> pb.TierStatus:
    moved = usage.moved
    return pb.TierStatus(
        tier=tier,
        slots=usage.slots,
        used_slots=usage.used,
        pinned_slots=usage.pinned,
        retired_slots=usage.retired,
        hit_tokens=moved.hits * block_tokens,
        hit_blocks=moved.hits,
        stored_blocks=moved.stores,
        loaded_blocks=moved.loads,
        skipped_blocks=moved.skipped,
        dropped_blocks=moved.dropped,
        bad_blocks=moved.bad,
        evictions=usage.evictions,
        tenants=[
            pb.TenantBlocks(tenant=tenant, blocks=blocks, bytes=blocks * block_bytes)
            for tenant, blocks in sorted(usage.tenants.items())
        ],
    )


def _add_moved(ssd: pb.TierStatus, mover: MoverStatus) -> None:
    ssd.written.CopyFrom(
        pb.Moved(bytes=mover.written_bytes, time_us=mover.write_us, bytes_per_s=mover.write_bytes_per_s)
    )
    ssd.read.CopyFrom(pb.Moved(bytes=mover.read_bytes, time_us=mover.read_us, bytes_per_s=mover.read_bytes_per_s))
    ssd.errors.extend(pb.DiskErrors(name=name, calls=calls) for name, calls in sorted(mover.errors.items()))


@functools.cache
def _build() -> str:
    try:
        return importlib.metadata.version("jitney")
    except importlib.metadata.PackageNotFoundError:
        return "source"
