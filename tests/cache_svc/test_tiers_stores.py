"""Blocks go down: demotion, the places that the SSD keeps, and what becomes of copies that come too late."""

from __future__ import annotations

import pytest

from cache_svc.tiers import TierLimits
from jitney.block_ops import Tier
from jitney.errors import InvalidRequest, Missing
from jitney.ticket_ops import AbortTicket, LoadDone, StoreDone, Ticket
from tests.support.ledger_rig import prompt
from tests.support.tier_rig import TierRig

CPU_ONLY = TierLimits(cpu_slots=16)


def test_what_is_evicted_next_is_stored_before_and_found_after() -> None:
    rig = TierRig(CPU_ONLY)
    device = rig.device(8)
    device.cache(1, prompt(1, 2, 3))
    device.cache(2, prompt(4, 5, 6, 7))
    device.release(1)
    assert not device.stores  # one block is free: that is enough
    for evicted in range(3):
        device.apply(grant=1)
        if evicted < 2:
            (order,) = device.stores.values()
            assert (len(order.blocks), order.urgent) == (1, False)
            device.store()
        assert device.where(prompt(1, 2, 3)) == (3 - evicted, evicted, 0)
    assert rig.tiers.usage().unstored == 0


def test_a_demoted_chain_is_loaded_again() -> None:
    rig = TierRig(CPU_ONLY)
    device = rig.device(32)
    chain = prompt(1, 2, 3)
    device.cache(1, chain)
    device.release(1)
    device.apply(grant=28)
    assert [len(order.blocks) for order in device.stores.values()] == [3]
    device.store()
    device.evict_all()
    assert device.where(chain) == (0, 3, 0)
    reserved = device.board(2, prompt(1, 2, 3, 4), load=9)
    assert (reserved.cpu_blocks, reserved.ssd_blocks) == (3, 0)
    assert device.load(reserved.ticket) == 3
    device.compute(2, prompt(1, 2, 3, 4), reserved.blocks, 0)
    assert device.right()
    assert rig.tiers.usage().cpu.moved.hits == 3
    assert rig.tiers.usage().unstored == 0


def test_a_copy_of_a_block_that_was_evicted_meanwhile_is_void() -> None:
    rig = TierRig(CPU_ONLY)
    device = rig.device(8)
    device.cache(1, prompt(1))
    device.release(1)
    device.apply(grant=7)
    (order,) = device.stores.values()
    device.apply(grant=1)  # the block is somebody else's now
    assert rig.tiers.usage().unstored == 0  # it was under way
    device.store()
    assert device.where(prompt(1)) == (0, 0, 0)
    assert rig.tiers.usage().cpu.used == 0
    assert rig.tiers.usage().cpu.moved.dropped == 1
    assert order.ticket not in device.ledger.below.tickets.open  # type: ignore[union-attr]


def test_blocks_that_are_evicted_without_a_copy_are_counted() -> None:
    rig = TierRig(CPU_ONLY)
    device = rig.device(8)
    device.cache(1, prompt(1, 2, 3))
    device.release(1)
    device.apply(grant=8)
    assert rig.tiers.usage().unstored == 3


def test_the_end_of_a_prompt_is_kept_on_the_ssd_and_outlives_the_cache() -> None:
    rig = TierRig(TierLimits(cpu_slots=8, ssd_slots=8))
    device = rig.device(16)
    chain = prompt(1, 2, 3)
    device.cache(1, chain)
    rig.idle()
    assert sorted(entry.place for entry, _ in rig.disk.values()) == [False, False, True]
    again = TierRig(TierLimits(cpu_slots=8, ssd_slots=8), rig.disk)
    other = again.device(16)
    again.scan()
    assert other.where(chain) == (0, 0, 3)
    assert other.where(prompt(1, 2)) == (0, 0, 0)  # a hit does not end within a unit
    reserved = other.board(1, chain, load=3)
    assert (reserved.cpu_blocks, reserved.ssd_blocks) == (0, 3)
    again.work()
    assert other.load(reserved.ticket) == 3
    other.compute(1, chain, reserved.blocks, 0)
    assert other.right()
    assert again.tiers.usage().ssd.moved.hits == 3
    assert other.where(chain) == (3, 0, 0)
    other.release(1)
    other.evict_all()
    assert other.where(chain) == (0, 3, 0)  # what was read stays in the CPU tier


def test_the_end_of_an_answer_and_a_parting_point_are_kept() -> None:
    rig = TierRig(TierLimits(cpu_slots=16, ssd_slots=16))
    device = rig.device(32)
    reserved = device.board(1, prompt(1, 2, 3), extra=2)
    device.compute(1, prompt(1, 2, 3, 4, 5), reserved.blocks, 0)
    device.release(1)
    rig.idle()
    places = {entry.key for entry, _ in rig.disk.values() if entry.place}
    assert places == {prompt(1, 2, 3).keys[-1], prompt(1, 2, 3, 4, 5).keys[-1]}
    device.cache(2, prompt(1, 2, 9))
    rig.idle()
    assert rig.tiers.lower.ssd.place[rig.tiers.lower.ssd.index.sealed[prompt(1, 2).keys[-1]]]
    found = {entry.key for entry, _ in rig.disk.values() if entry.place}  # what a restart would find
    assert found - places == {prompt(1, 2).keys[-1], prompt(1, 2, 9).keys[-1]}
    assert len(rig.disk) == 6


def test_long_chains_are_kept_piece_by_piece() -> None:
    rig = TierRig(TierLimits(cpu_slots=32, ssd_slots=32, interval_blocks=4))
    device = rig.device(32)
    chain = prompt(*range(10))
    reserved = device.board(1, chain)
    device.compute(1, chain, reserved.blocks[:9], 0)
    rig.idle()
    assert len(rig.disk) == 8
    assert [entry.key for entry, _ in rig.disk.values() if entry.place] == [chain.keys[3], chain.keys[7]]


def test_a_failed_write_is_dropped_and_counted() -> None:
    rig = TierRig(TierLimits(cpu_slots=8, ssd_slots=8))
    device = rig.device(16)
    device.cache(1, prompt(1, 2))
    device.store()
    assert rig.work(ok=False) == 2
    assert rig.tiers.usage().ssd.moved.dropped == 2
    assert rig.tiers.usage().ssd.used == 0
    device.release(1)
    device.cache(2, prompt(1, 2))  # comes again: is tried again
    rig.idle()
    assert len(rig.disk) == 2


def test_with_a_ring_of_two_slots_all_still_reaches_the_ssd() -> None:
    rig = TierRig(TierLimits(cpu_slots=2, staging_slots=2, ssd_slots=32))
    device = rig.device(32)
    chain = prompt(*range(9))
    device.cache(1, chain)
    rig.idle()
    assert len(rig.disk) == 9
    assert rig.tiers.usage().ssd.moved.dropped == 0
    device.release(1)
    device.evict_all()
    assert device.where(chain)[0] == 0


@pytest.mark.parametrize("limits", [TierLimits(), TierLimits(ssd_slots=9), TierLimits(cpu_slots=1)])
def test_without_tiers_all_goes_on(limits: TierLimits) -> None:
    rig = TierRig(limits)
    device = rig.device(4)
    for number in range(6):
        device.cache(number + 1, prompt(number, 1, 2))
        rig.idle()
        device.release(number + 1)
        rig.idle()
    assert device.answer.counts.free + device.answer.counts.evictable == 4


def test_repeats_are_ignored_and_unknown_tickets_refused() -> None:
    rig = TierRig(CPU_ONLY)
    device = rig.device(8)
    device.cache(1, prompt(1))
    device.release(1)
    device.apply(grant=7)
    (order,) = device.stores.values()
    done = device.copy_out(order)
    with pytest.raises(InvalidRequest):
        device.tell(StoreDone(order.ticket, [1, 2]))
    for _ in range(3):
        device.tell(done)
    device.tell(AbortTicket(order.ticket))
    device.tell(LoadDone(order.ticket, 5))
    for unknown in (0, 2, 99):
        with pytest.raises(Missing):
            device.tell(AbortTicket(Ticket(unknown)))
    assert rig.tiers.usage().cpu.moved.stores == 1


def test_open_orders_are_told_again() -> None:
    rig = TierRig(CPU_ONLY)
    device = rig.device(8)
    device.cache(1, prompt(1))
    device.release(1)
    device.apply(grant=7)
    (order,) = device.stores.values()
    assert rig.tiers.open_events(device.owner) == [order]
    device.store()
    assert rig.tiers.open_events(device.owner) == []


def test_a_tenant_has_no_more_than_its_part() -> None:
    rig = TierRig(TierLimits(cpu_slots=8, tenant_permille=500))
    device = rig.device(64)
    for number in range(1, 8):
        device.cache(number, prompt(number), tenant="big")
        device.release(number)
    device.cache(10, prompt(10), tenant="small")
    device.release(10)
    device.apply(grant=56)
    while device.stores:
        device.store()
    assert rig.tiers.usage().cpu.tenants == {"big": 4, "small": 1}


def test_room_that_another_executor_makes_is_used_at_once() -> None:
    rig = TierRig(TierLimits(cpu_slots=1, ssd_slots=4, pin_permille=1000, interval_blocks=1))
    first, second = rig.device(4, "first"), rig.device(4, "second")
    first.cache(1, prompt(0))
    first.swap(1, Tier.CPU)
    rig.idle()
    second.cache(1, prompt(0, 1))
    rig.idle()
    assert second.where(prompt(0, 1)) == (2, 0, 0)
    assert not second.stores and len(rig.disk) == 1  # the only slot is pinned
    first.board(1, prompt(0))
    assert len(second.stores) == 1
    rig.idle()
    assert {entry.key for entry, _ in rig.disk.values()} == set(prompt(0, 1).keys)
