"""The audit of the lower tiers finds what is wrong: each fault is planted in sound tiers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache_svc.audit import audit
from cache_svc.tier_audit import audit_tiers
from cache_svc.tiers import TierLimits
from jitney.block_ops import Tier
from jitney.keys import Key
from tests.support.ledger_rig import prompt
from tests.support.tier_rig import DeviceRig, TierRig

NOBODYS = Key(b"x" * 32)


def _device() -> DeviceRig:
    """Something is stored in both tiers, and request 2 is swapped out."""
    rig = TierRig(TierLimits(cpu_slots=8, ssd_slots=8, interval_blocks=2))
    device = rig.device(10)
    device.cache(1, prompt(1, 2, 3))
    device.release(1)
    device.cache(2, prompt(4, 5))
    device.swap(2, Tier.CPU)
    device.cache(3, prompt(6))
    rig.idle()
    device.evict_all()
    return device


def _stored(device: DeviceRig) -> int:
    return next(iter(device.rig.tiers.lower.cpu.index.sealed.values()))


FAULTS: dict[str, Callable[[DeviceRig], object]] = {
    "a user": lambda d: d.rig.tiers.lower.cpu.users.__setitem__(_stored(d), 1),
    "retired count": lambda d: setattr(d.rig.tiers.lower.cpu, "retired", 1),
    "tenants": lambda d: d.rig.tiers.lower.cpu.tenants.__setitem__("x", 1),
    "no more free": lambda d: d.rig.tiers.lower.cpu.free.popitem(),
    "free and stored": lambda d: d.rig.tiers.lower.cpu.free.__setitem__(_stored(d), None),
    "pins of keys": lambda d: d.rig.tiers.lower.cpu.pinned.clear(),
    "pins of requests": lambda d: d.rig.tiers.lower.pins.requests.clear(),
    "kept": lambda d: d.rig.tiers.lower.disk.kept.__setitem__(NOBODYS, True),
    "storing": lambda d: d.rig.tiers.lower.storing.__setitem__(NOBODYS, 0),
    "reserved": lambda d: d.rig.tiers.lower.disk.reserved.__setitem__(NOBODYS, 0),
    "written slots": lambda d: d.rig.tiers.lower.disk.written_slots.append(0),
    "token ids": lambda d: d.rig.tiers.lower.cpu.index.token_ids.__setitem__(_stored(d), bytes(16)),
    "eviction order": lambda d: d.rig.tiers.lower.cpu.order.order.popitem(),
    "device pins": lambda d: d.ledger.blocks.pins.__setitem__(0, 1),
    "in flight": lambda d: setattr(d.rig.tiers.belows[d.owner].stores, "in_flight", 3),
    "waits to be stored": lambda d: d.rig.tiers.belows[d.owner].stores.waiting.append((0, NOBODYS)),
    "fenced with pins": lambda d: setattr(d.rig.tiers.belows[d.owner], "fenced", True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    device = _device()
    FAULTS[fault](device)
    assert audit_tiers(device.rig.tiers) + audit(device.ledger)
