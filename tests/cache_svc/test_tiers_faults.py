"""Executors that hang, are fenced, come back late or go; content that is to be forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_svc.epochs import DevicePool, Epochs
from cache_svc.invalidate import What, invalidate
from cache_svc.tier_audit import audit_tiers
from cache_svc.tiers import TierLimits, Tiers
from jitney.block_ops import LowerTiers, ResultCode, Tier
from jitney.errors import InvalidRequest, Missing
from jitney.keys import salt_digest
from tests.support.ledger_rig import BLOCK_TOKENS, OK, prompt
from tests.support.tier_rig import GARBAGE, DeviceRig, TierRig

CHAIN = prompt(1, 2, 3, 4)


def frozen(limits: TierLimits) -> DeviceRig:
    """An executor that was asked to store four blocks, and is fenced before it answers."""
    rig = TierRig(limits)
    device = rig.device(8)
    device.cache(1, CHAIN)
    device.swap(1, Tier.CPU)
    rig.tiers.fence(device.owner)
    return device


@pytest.mark.parametrize("how", ["answers", "aborts", "goes"])
def test_slots_of_a_fenced_executor_are_nobody_elses_until_it_touches_them_no_more(how: str) -> None:
    device = frozen(TierLimits(cpu_slots=6, pin_permille=1000))
    rig = device.rig
    usage = rig.tiers.usage().cpu
    assert (usage.retired, usage.pinned, usage.used) == (4, 0, 0)
    assert rig.tiers.retired() == [device.owner]
    rig.devices.clear()
    new = rig.device(8, epoch=2)
    new.cache(1, CHAIN)
    assert new.swap(1, Tier.CPU).pinned_blocks == 2  # there are two other slots
    new.store()
    (order,) = device.stores.values()
    if how == "answers":
        device.bytes[:] = [b"zombie"] * 8
        device.tell(device.copy_out(order))
        assert new.where(CHAIN)[1] == 0
        new.evict_all()
        assert new.where(CHAIN)[1] == 2
    elif how == "aborts":
        device.abort(order.ticket)
    else:
        rig.tiers.gone(device.owner)
    usage = rig.tiers.usage().cpu
    assert (usage.retired, usage.used) == (0, 2)
    assert rig.tiers.retired() == []
    assert audit_tiers(rig.tiers) == []
    with pytest.raises(Missing):
        rig.tiers.told(device.owner, device.copy_out(order))
    rig.tiers.gone(device.owner)
    rig.tiers.fence(device.owner)


def test_an_executor_that_goes_on_without_its_lock_has_nothing_below() -> None:
    rig = TierRig(TierLimits(cpu_slots=8, ssd_slots=8, interval_blocks=2))
    device = rig.device(8)
    device.cache(1, CHAIN)
    rig.idle()
    rig.tiers.gone(device.owner)
    used = rig.tiers.usage().cpu.used
    assert device.swap(1, Tier.CPU).pinned_blocks == 0
    assert device.board(2, CHAIN, load=4).ticket == 0
    device.release(2)
    for request in range(3, 9):
        device.cache(request, prompt(*range(10 * request, 10 * request + 5)))
        device.release(request)
    assert device.answer.lower == LowerTiers()
    assert device.where(CHAIN)[1:] == (0, 0)
    assert (rig.tiers.usage().cpu.used, rig.tiers.usage().cpu.retired) == (used, 0)


def test_the_loads_of_a_fenced_executor_hold_nothing() -> None:
    rig = TierRig(TierLimits(cpu_slots=4, pin_permille=1000))
    device = rig.device(8)
    device.cache(1, CHAIN)
    device.swap(1, Tier.CPU)
    device.store()
    device.evict_all()
    reserved = device.board(1, CHAIN, load=4)
    before = device.loads[reserved.ticket].ready  # type: ignore[index]
    rig.tiers.fence(device.owner)
    rig.devices.clear()
    other = rig.device(8, epoch=2)
    other.cache(1, prompt(7, 8, 9, 6))
    assert other.swap(1, Tier.CPU).pinned_blocks == 4
    other.store()
    for slot, _ in before:
        assert slot >> 32 != rig.generations[slot & 0xFFFFFFFF]  # a zombie that reads them sees it


def test_opening_anew_fences_the_older_epoch() -> None:
    tiers = Tiers(TierLimits(cpu_slots=4))
    epochs = Epochs(b"b" * 16)
    pool = DevicePool("e", 1, b"print", 8, 64, BLOCK_TOKENS)
    epochs.open(pool, redeclares=False, tiers=tiers)
    assert list(tiers.belows) == [("e", 1)]
    epochs.open(replace(pool, incarnation=2), redeclares=True, tiers=tiers)
    assert list(tiers.belows) == [("e", 2)]
    epochs.of("e").redeclare([])
    assert list(tiers.belows) == [("e", 2)]
    assert epochs.of("e").ledger.below is tiers.belows["e", 2]


def test_nothing_is_kept_of_epochs_that_have_no_slots() -> None:
    tiers = Tiers(TierLimits(cpu_slots=4))
    epochs = Epochs(b"b" * 16)
    for _ in range(3):
        epochs.open(DevicePool("e", 1, b"print", 8, 64, BLOCK_TOKENS), redeclares=True, tiers=tiers)
    assert not epochs.of("e").before


@pytest.mark.parametrize("incarnation", [1, 2], ids=["itself", "another"])
def test_a_declaration_frees_what_the_same_process_was_filling(incarnation: int) -> None:
    rig = TierRig(TierLimits(cpu_slots=6, pin_permille=1000))
    epochs = Epochs(b"b" * 16)
    pool = DevicePool("e", 1, b"print", 8, 64, BLOCK_TOKENS)
    epochs.open(pool, redeclares=False, tiers=rig.tiers)
    device = rig.device(8)
    device.cache(1, CHAIN)
    device.swap(1, Tier.CPU)
    for epoch in (2, 3):
        epochs.open(replace(pool, incarnation=incarnation), redeclares=True, tiers=rig.tiers)
        assert epochs.of("e").epoch == epoch and rig.tiers.retired() == [("e", 1)]
    epochs.of("e").redeclare([])
    assert rig.tiers.retired() == ([] if incarnation == 1 else [("e", 1)])


# Forgetting.


def full(tenant: str = "t") -> tuple[TierRig, DeviceRig]:
    """A chain whose four blocks are on the device (held), in the CPU tier and on the SSD."""
    rig = TierRig(TierLimits(cpu_slots=16, ssd_slots=16))
    device = rig.device(16)
    device.cache(1, CHAIN, tenant=tenant)
    rig.idle()
    return rig, device


@pytest.mark.parametrize(
    ("what", "blocks"),
    [
        (What(prefix_key=CHAIN.keys[1]), 3),
        (What(prefix_key=CHAIN.root), 4),
        (What(tenant="t"), 4),
        (What(tenant="other"), 0),
        (What(salt_digest=salt_digest("")), 4),
        (What(model_version="model"), 4),
        (What(prefix_key=prompt(9).keys[0]), 0),
    ],
)
def test_content_is_forgotten_in_every_tier(what: What, blocks: int) -> None:
    rig, device = full()
    gone = invalidate([device.ledger], [rig.tiers], what)
    assert (gone.device, gone.cpu, gone.ssd) == (blocks, blocks, blocks)
    rig.settle()
    rig.work()
    assert device.where(CHAIN) == (4 - blocks, 0, 0)
    assert len(rig.disk) == 4 - blocks
    assert device.answer.counts.free == 12  # what is held is held
    device.release(1)
    assert device.answer.counts.free == 12 + blocks


def test_what_is_computed_behind_forgotten_content_is_nobody_elses() -> None:
    rig = TierRig(TierLimits(cpu_slots=16, ssd_slots=16))
    device = rig.device(16)
    reserved = device.board(1, CHAIN)
    device.compute(1, CHAIN, reserved.blocks[:2], 0)
    joined = device.board(2, prompt(1, 2, 3, 9))
    assert device.answer.acquires[0].joined == 1
    invalidate([device.ledger], [rig.tiers], What(prefix_key=CHAIN.keys[0]))
    rig.settle()
    answer = device.apply(seals=[CHAIN.seal(1, reserved.blocks[2:], 2)])
    assert answer.seals == [[ResultCode.DUPLICATE] * 2]
    assert [(event.request, event.withdrawn) for event in answer.joins] == [(2, 1)]
    third = device.board(3, CHAIN)  # computes all of it, and is found
    assert (third.code, len(third.blocks)) == (OK, 4)
    device.compute(3, CHAIN, third.blocks, 0)
    assert device.where(CHAIN)[0] == 4
    assert len(joined.blocks) == 1
    device.release(1, 2, 3)
    assert device.answer.counts.evictable == 4


def test_copies_under_way_of_forgotten_content_come_to_nothing() -> None:
    rig, device = full()
    other = rig.device(16, "f")
    ticket = other.board(1, CHAIN, load=4).ticket
    device.board(2, prompt(1, 2, 3, 4, 5))
    device.compute(2, prompt(1, 2, 3, 4, 5), device.answer.reserves[0].blocks, 4)
    assert device.swap(2, Tier.CPU).leaving_blocks == 1
    ledgers = [device.ledger, other.ledger]
    invalidate(ledgers, [rig.tiers], What(prefix_key=CHAIN.keys[2]))
    rig.settle()
    assert rig.tiers.usage().cpu.retired == 3  # two that are read, one that is written
    device.store()
    good = other.load(ticket)
    blocks = other.results[ticket].blocks  # type: ignore[index]
    assert other.apply(seals=[CHAIN.seal(1, blocks[:good])]).seals[0][2:] == [ResultCode.DUPLICATE] * 2
    rig.idle()
    usage = rig.tiers.usage()
    assert (usage.cpu.used, usage.ssd.used, usage.cpu.retired, usage.ssd.retired) == (2, 2, 0, 0)
    assert other.where(CHAIN)[0] == 0 and device.where(CHAIN)[0] == 2
    assert len(rig.disk) == 2


def test_reads_and_writes_under_way_of_forgotten_content_come_to_nothing() -> None:
    rig, device = full()
    fresh = TierRig(TierLimits(cpu_slots=8, ssd_slots=16), rig.disk)
    reader, writer = fresh.device(16, "r"), fresh.device(16, "w")
    fresh.scan()
    ticket = reader.board(1, CHAIN, load=4).ticket
    writer.cache(1, prompt(6, 7))
    writer.store()
    assert fresh.tiers.room()[1].queue_blocks == 6
    gone = invalidate([reader.ledger, writer.ledger], [fresh.tiers], What(tenant="t"))
    assert (gone.device, gone.cpu, gone.ssd) == (2, 2, 4)
    fresh.settle()
    assert reader.loads[ticket].lost == 0  # type: ignore[index]
    while fresh.work():
        pass
    assert not fresh.disk
    assert reader.load(ticket) == 0
    usage = fresh.tiers.usage()
    assert (usage.cpu.used, usage.ssd.used, usage.cpu.retired, usage.ssd.retired) == (0, 0, 0, 0)
    assert usage.ssd.moved.bad == 0
    assert device.right()


def test_one_thing_is_named_to_be_forgotten() -> None:
    for wrong in ({}, {"tenant": "a", "model_version": "b"}):
        with pytest.raises(InvalidRequest):
            What(**wrong)  # type: ignore[arg-type]


def test_garbage_in_a_store_is_found_by_its_reader() -> None:
    rig = TierRig(TierLimits(cpu_slots=8))
    device = rig.device(8)
    device.cache(1, CHAIN)
    device.swap(1, Tier.CPU)
    device.store()
    device.evict_all()
    for slot in range(8):
        rig.slots[slot] = GARBAGE
    reserved = device.board(1, CHAIN, load=4)
    assert device.load(reserved.ticket) == 0
    assert device.where(CHAIN) == (0, 0, 0)
