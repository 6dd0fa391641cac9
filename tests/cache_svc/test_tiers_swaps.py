"""Swapped requests: stored, pinned, released; resumed by a hit; pins that end."""

from __future__ import annotations

import pytest

from cache_svc.tiers import TierLimits
from jitney.block_ops import Acquire, RequestId, Reserve, ResultCode, SwapResult, Tier
from tests.support.ledger_rig import OK, prompt
from tests.support.tier_rig import DeviceRig, TierRig

CHAIN = prompt(1, 2, 3, 4)
HELD = prompt(*range(20, 28))


def running(limits: TierLimits, blocks: int = 8) -> DeviceRig:
    """Request 1 has a prompt of four blocks and one that is not full."""
    device = TierRig(limits).device(blocks)
    reserved = device.board(1, CHAIN, extra=1)
    device.compute(1, CHAIN, reserved.blocks, 0)
    return device


def test_a_swap_frees_its_blocks_with_its_copies_and_is_resumed_by_a_hit() -> None:
    device = running(TierLimits(cpu_slots=16))
    assert device.swap(1, Tier.CPU) == SwapResult(OK, 4, 4)
    counts = device.answer.counts
    assert (counts.free, counts.evictable, counts.leaving) == (4, 0, 4)
    (order,) = device.stores.values()
    assert (len(order.blocks), order.urgent) == (4, True)
    short = device.board(2, HELD)
    assert (short.code, short.short_by) == (ResultCode.SHORT, 4)
    device.store()
    device.cache(2, HELD)  # takes all of the device
    device.release(2)
    assert device.where(CHAIN) == (0, 4, 0)
    assert device.ledger.below is not None and device.rig.tiers.room()[0].pin_blocks == 4
    reserved = device.board(1, CHAIN, extra=1, load=4)
    assert reserved.cpu_blocks == 4
    assert device.rig.tiers.room()[0].pin_blocks == 8
    assert device.load(reserved.ticket) == 4
    device.compute(1, CHAIN, reserved.blocks, 0)
    assert device.right()


def test_blocks_of_a_swap_come_free_from_the_end_of_the_chain_on() -> None:
    device = TierRig(TierLimits(cpu_slots=16)).device(16)
    chain = prompt(*range(6))
    device.compute(1, chain, device.board(1, chain).blocks, 0)
    device.swap(1, Tier.CPU)
    assert [len(order.blocks) for order in device.stores.values()] == [4, 2]
    leaving = []
    for ticket in list(device.stores):
        device.store(ticket)
        leaving.append(device.apply().counts.leaving)
    assert leaving == [2, 0]
    assert device.where(chain) == (6, 0, 0) and device.right()


def test_a_demotion_under_way_that_a_swap_waits_for_becomes_urgent() -> None:
    device = running(TierLimits(cpu_slots=16, ssd_slots=16))
    (order,) = device.stores.values()  # the end of the prompt, for the SSD
    assert not order.urgent
    device.swap(1, Tier.CPU)
    assert device.stores[order.ticket].urgent
    device.store()
    assert device.apply().counts.leaving == 0 and device.right()


def test_what_is_below_already_is_pinned_and_not_stored_again() -> None:
    device = running(TierLimits(cpu_slots=16))
    device.swap(1, Tier.CPU)
    device.store()
    device.board(1, CHAIN, extra=2)
    reserved = device.answer.reserves[0]
    longer = prompt(1, 2, 3, 4, 5)
    device.compute(1, longer, reserved.blocks[:1], 4)
    assert device.swap(1, Tier.CPU) == SwapResult(OK, 5, 1)
    assert device.answer.counts.leaving == 5  # the four before it cannot go before it does
    device.store()
    assert device.apply().counts.leaving == 0


def test_pins_outlast_the_pressure_of_others() -> None:
    device = running(TierLimits(cpu_slots=8))
    device.swap(1, Tier.CPU)
    device.store()
    for number in range(2, 12):
        device.cache(number, prompt(number, 1, 2, 3))
        device.release(number)
        device.rig.idle()
    assert device.where(CHAIN)[1] == 4


@pytest.mark.parametrize("end", ["board", "release", "time", "fence"])
def test_pins_end(end: str) -> None:
    device = running(TierLimits(cpu_slots=8, pin_limit_us=1000))
    device.rig.tiers.now_us = 5
    device.swap(1, Tier.CPU)
    device.store()
    assert device.rig.tiers.usage().cpu.pinned == 4
    if end == "board":
        device.apply(acquires=[Acquire(RequestId(1), CHAIN.keys)], reserves=[Reserve(RequestId(1), CHAIN.keys, 4)])
    elif end == "release":
        assert device.release(1).releases == [[OK]]
        assert device.release(1).releases == [[ResultCode.NOT_HELD]]
    elif end == "time":
        device.rig.tiers.now_us = 1005
        device.apply()
        assert device.rig.tiers.usage().cpu.pinned == 4
        device.rig.tiers.now_us = 1006
        device.apply()
    else:
        device.rig.tiers.fence(device.owner)
    assert device.rig.tiers.usage().cpu.pinned == 0
    assert device.rig.tiers.usage().cpu.used == 4


def test_a_reserve_that_falls_short_leaves_the_pins() -> None:
    device = running(TierLimits(cpu_slots=8))
    device.swap(1, Tier.CPU)
    device.store()
    device.apply(grant=6)
    assert device.board(1, CHAIN, extra=4, load=4).code is ResultCode.SHORT
    assert device.rig.tiers.usage().cpu.pinned == 4


def test_the_oldest_gives_its_pins_to_the_newest() -> None:
    rig = TierRig(TierLimits(cpu_slots=8))
    device = rig.device(16)
    device.cache(1, prompt(1, 2, 3))
    device.cache(2, prompt(5, 6, 7))
    device.swap(1, Tier.CPU)
    device.swap(2, Tier.CPU)
    rig.idle()
    (swapped,) = rig.tiers.lower.pins.requests
    assert swapped == (device.owner, 2)
    assert device.swap(3, Tier.CPU).code is ResultCode.NOT_HELD


def test_what_is_over_the_budget_is_cached_on_the_device() -> None:
    device = running(TierLimits(cpu_slots=6))
    assert device.swap(1, Tier.CPU) == SwapResult(OK, 3, 3)
    assert device.answer.counts.leaving == 3
    assert device.answer.counts.evictable == 1
    device.store()
    assert device.where(CHAIN) == (4, 0, 0)


@pytest.mark.parametrize("limits", [TierLimits(), TierLimits(ssd_slots=4), TierLimits(cpu_slots=4, staging_slots=4)])
def test_without_a_cpu_tier_a_swap_is_a_release(limits: TierLimits) -> None:
    device = running(limits)
    assert device.swap(1, Tier.CPU) == SwapResult(OK, 0, 0)
    assert device.answer.counts.evictable == 4
    assert device.rig.tiers.room()[0].free_blocks == 0


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_a_swap_to_the_ssd_goes_through_as_few_slots_as_there_are(slots: int) -> None:
    device = running(TierLimits(cpu_slots=slots, staging_slots=slots, ssd_slots=16))
    rig = device.rig
    rig.idle()  # the end of the prompt is kept anyway
    reserved = device.board(2, prompt(5, 6, 7))
    device.compute(2, prompt(5, 6, 7), reserved.blocks[:2], 0)
    result = device.swap(2, Tier.SSD)
    assert (result.pinned_blocks, result.leaving_blocks) == (2, 2)
    assert device.answer.counts.leaving == 2
    rig.idle()
    assert device.apply().counts.leaving == 0
    assert device.swap(1, Tier.SSD).pinned_blocks == 4
    rig.idle()
    device.evict_all()
    assert rig.tiers.usage().ssd.pinned == 6
    if slots > 1:
        assert device.where(prompt(5, 6, 7))[0] == 0
        assert sum(device.where(prompt(5, 6, 7))) == 2
    reserved = device.board(2, prompt(5, 6, 7), load=3)
    rig.idle()
    if slots > 1:
        assert device.load(reserved.ticket) == 2
    assert rig.tiers.usage().ssd.pinned == 4


def test_a_swap_to_the_ssd_that_is_released_waits_for_nothing() -> None:
    device = running(TierLimits(cpu_slots=1, staging_slots=1, ssd_slots=16))
    device.release(1)
    device.rig.idle()
    reserved = device.board(2, prompt(5, 6, 7))
    device.compute(2, prompt(5, 6, 7), reserved.blocks[:2], 0)
    device.swap(2, Tier.SSD)
    assert device.answer.counts.leaving == 2
    device.release(2)
    assert device.answer.counts.leaving == 1  # its copy is under way
    device.rig.idle()
    assert device.apply().counts.leaving == 0


def test_a_failed_write_of_a_swap_is_a_miss() -> None:
    device = running(TierLimits(cpu_slots=8, ssd_slots=16), blocks=16)
    device.swap(1, Tier.SSD)
    device.store()
    device.rig.work(ok=False)
    assert device.rig.tiers.usage().ssd.used == 0
    assert device.where(CHAIN) == (4, 0, 0)
    assert device.board(1, CHAIN, load=4).code is OK
    assert device.rig.tiers.usage().ssd.pinned == 0


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.SSD])
def test_a_swap_does_not_wait_for_a_copy_whose_block_was_evicted(tier: Tier) -> None:
    limits = TierLimits(cpu_slots=16, ssd_slots=16)
    device = running(limits)
    device.release(1)
    device.cache(1, CHAIN)
    device.release(1)
    order = next(iter(device.stores.values()))  # its end is a place of the SSD
    device.evict_all()
    device.cache(9, prompt(77))  # so that the chain gets other blocks
    device.cache(1, CHAIN)
    assert device.swap(1, tier).pinned_blocks == 4
    device.store(order.ticket)
    device.rig.idle()
    device.release(9)
    assert device.answer.counts.leaving == 0
    device.evict_all()
    cpu, ssd = device.where(CHAIN)[1:]
    assert cpu + ssd == 4
    assert device.load(device.board(3, CHAIN, load=4).ticket) == 4
    assert device.right()
