"""Blocks come up: loads with a Reserve, reads from the SSD, and bytes that are not what they should be."""

from __future__ import annotations

import pytest

from cache_svc.disk_jobs import DiskHeader, DiskRead
from cache_svc.invalidate import What, invalidate
from cache_svc.tiers import TierLimits
from jitney.block_ops import RequestId, Return, Tier
from jitney.errors import InvalidRequest
from jitney.ticket_ops import LoadDone, LoadReady, Prefetch, Ticket, TicketLost
from tests.support.ledger_rig import OK, Prompt, prompt
from tests.support.tier_rig import GARBAGE, TierRig

CHAIN = prompt(1, 2, 3, 4)


def stored(limits: TierLimits, *chains: Prompt) -> TierRig:
    """Chains in the CPU tier, and on the SSD if there is one; nothing on the device."""
    rig = TierRig(limits)
    device = rig.device(32)
    for number, chain in enumerate(chains, 1):
        device.cache(number, chain)
        rig.idle()
        device.release(number)
    granted = device.apply(grant=32 - 4 * len(chains)).granted
    rig.idle()
    device.evict_all()
    device.apply(returns=[Return(granted)])
    return rig


def on_disk(*chains: Prompt, cpu_slots: int = 16) -> TierRig:
    """A cache that was started anew, with these chains on its SSD; two executors."""
    limits = TierLimits(cpu_slots=16, ssd_slots=32)
    rig = TierRig(TierLimits(cpu_slots=cpu_slots, ssd_slots=32), stored(limits, *chains).disk)
    rig.device(32, "a")
    rig.device(32, "b")
    rig.scan()
    return rig


def test_only_what_was_asked_for_is_loaded_and_the_rest_counts_as_skipped() -> None:
    rig = stored(TierLimits(cpu_slots=16), CHAIN)
    (device,) = rig.devices
    reserved = device.board(9, CHAIN, load=2)
    assert (reserved.cpu_blocks, len(reserved.blocks)) == (2, 4)
    assert device.load(reserved.ticket) == 2
    assert rig.tiers.usage().cpu.moved.skipped == 2
    device.compute(9, CHAIN, reserved.blocks, 0)
    assert device.right()


def test_nothing_is_loaded_behind_a_join() -> None:
    rig = stored(TierLimits(cpu_slots=16), CHAIN)
    (device,) = rig.devices
    rig.tiers.lower.cpu.remove({rig.tiers.lower.cpu.index.sealed[CHAIN.keys[3]]})
    first = device.board(8, CHAIN, load=1)
    assert first.cpu_blocks == 1
    hits = device.hits(CHAIN)
    assert (hits.cpu_blocks, hits.pending_blocks, hits.pending_owner) == (0, 4, 8)
    second = device.board(9, prompt(1, 2, 3, 4, 5), load=5)
    assert (second.ticket, len(second.blocks)) == (0, 1)
    device.load(first.ticket)
    device.compute(8, CHAIN, first.blocks, 0)
    assert device.answer.joins[0].request == 9


def test_blocks_of_cpu_tier_and_ssd_come_in_the_order_of_the_chain() -> None:
    rig = on_disk(CHAIN)
    first = rig.devices[0].board(1, CHAIN, load=1)
    rig.work()
    rig.devices[0].load(first.ticket)  # the first block is in the CPU tier now
    device = rig.devices[1]
    assert device.where(CHAIN) == (0, 1, 3)
    reserved = device.board(1, CHAIN, load=4)
    assert (reserved.cpu_blocks, reserved.ssd_blocks) == (1, 3)
    assert len(device.loads[Ticket(reserved.ticket)].ready) == 1
    for job in reversed(rig.jobs[:]):
        rig.jobs.remove(job)
        rig.do(job)
        if rig.jobs:
            assert len(device.loads[Ticket(reserved.ticket)].ready) == 1
    assert device.load(reserved.ticket) == 4
    device.compute(1, CHAIN, reserved.blocks, 0)
    assert device.right()


def test_two_loads_wait_for_one_read() -> None:
    rig = on_disk(CHAIN)
    tickets = [device.board(1, CHAIN, load=4).ticket for device in rig.devices]
    assert len(rig.jobs) == 4
    rig.work()
    assert [device.load(ticket) for device, ticket in zip(rig.devices, tickets, strict=True)] == [4, 4]


def test_a_block_that_is_stored_while_it_is_read_is_right_for_who_waits_for_the_read() -> None:
    rig = on_disk(CHAIN)
    storing, loading = rig.devices
    storing.cache(1, CHAIN)
    storing.swap(1, Tier.CPU)
    reserved = loading.board(1, CHAIN, load=4)
    assert reserved.ssd_blocks == 4
    storing.store()  # the first to come is the one that stays
    rig.work()
    assert loading.load(reserved.ticket) == 4
    loading.compute(1, CHAIN, reserved.blocks, 0)
    assert loading.right()
    assert rig.tiers.usage().cpu.moved.bad == 0


def test_nothing_is_noted_of_slots_that_nobody_asks_for() -> None:
    rig = stored(TierLimits(cpu_slots=16, ssd_slots=32), CHAIN)
    assert rig.tiers.usage().ssd.used == 4
    assert not rig.tiers.lower.ssd.given


def test_a_read_ahead_becomes_urgent_when_somebody_waits() -> None:
    rig = on_disk(CHAIN)
    device = rig.devices[0]
    rig.tiers.told(device.owner, Prefetch(RequestId(1), CHAIN.keys, 3))
    device.ledger.apply  # noqa: B018
    reserved = device.board(1, CHAIN, load=4)
    assert [job.urgent for job in rig.jobs if isinstance(job, DiskRead)] == [True] * 4
    rig.work()
    assert device.load(reserved.ticket) == 4


def test_prefetch_brings_what_the_ssd_has_and_no_more_than_asked() -> None:
    rig = on_disk(CHAIN)
    device = rig.devices[0]
    device.tell(Prefetch(RequestId(1), CHAIN.keys, 3))
    assert [job.urgent for job in rig.jobs if isinstance(job, DiskRead)] == [False] * 3
    rig.work()
    assert device.where(CHAIN) == (0, 3, 1)
    device.tell(Prefetch(RequestId(1), CHAIN.keys, 3))
    assert len(rig.jobs) == 1


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_bad_read_ends_the_load_there_and_takes_what_stands_behind(bad: int) -> None:
    rig = on_disk(CHAIN)
    device = rig.devices[0]
    slot = rig.tiers.lower.ssd.index.sealed[CHAIN.keys[bad]]
    rig.disk[slot] = (rig.disk[slot][0], GARBAGE)
    reserved = device.board(1, CHAIN, load=4)
    rig.work()
    assert device.loads[Ticket(reserved.ticket)].lost == bad
    assert device.load(reserved.ticket) == bad
    usage = rig.tiers.usage()
    assert (usage.ssd.used, usage.ssd.moved.bad) == (bad, 1)
    rig.work()
    assert len(rig.disk) == bad  # erased
    device.compute(1, CHAIN, reserved.blocks, 0)
    rig.idle()
    assert device.right()
    assert len(rig.disk) == 4


def test_swapped_and_missing_files_are_misses() -> None:
    rig = on_disk(CHAIN, prompt(7, 8))
    device = rig.devices[0]
    sealed = rig.tiers.lower.ssd.index.sealed
    one, other = sealed[CHAIN.keys[2]], sealed[prompt(7).keys[0]]
    rig.disk[one], rig.disk[other] = rig.disk[other], rig.disk[one]
    reserved = device.board(1, CHAIN, load=4)
    rig.work()
    assert device.load(reserved.ticket) == 2
    rig.disk.clear()
    reserved = device.board(2, prompt(7, 8), load=2)
    rig.work()
    assert device.load(reserved.ticket) == 0
    assert rig.tiers.usage().ssd.moved.bad == 2


def test_a_bad_block_of_the_cpu_tier_goes_with_what_stands_behind() -> None:
    rig = stored(TierLimits(cpu_slots=16), CHAIN)
    (device,) = rig.devices
    rig.slots[rig.tiers.lower.cpu.index.sealed[CHAIN.keys[1]]] = GARBAGE
    reserved = device.board(9, CHAIN, load=4)
    assert device.load(reserved.ticket) == 1
    usage = rig.tiers.usage().cpu
    assert (usage.used, usage.moved.bad, usage.moved.dropped) == (1, 1, 2)
    assert device.answer.counts.leaving == 0


def test_what_a_load_reads_is_not_evicted() -> None:
    rig = stored(TierLimits(cpu_slots=4), CHAIN)
    (device,) = rig.devices
    reserved = device.board(9, CHAIN, load=4)
    device.cache(10, prompt(7, 8))
    device.release(10)
    device.apply(grant=26)
    assert not device.stores
    assert device.load(reserved.ticket) == 4
    device.compute(9, CHAIN, reserved.blocks, 0)
    assert device.right()
    assert device.stores


def test_a_released_request_keeps_its_blocks_until_its_load_has_ended() -> None:
    rig = stored(TierLimits(cpu_slots=16), CHAIN)
    (device,) = rig.devices
    reserved = device.board(9, CHAIN, load=4)
    counts = device.release(9).counts
    assert (counts.free, counts.leaving) == (28, 4)
    device.abort(reserved.ticket)
    counts = device.apply().counts
    assert (counts.free, counts.leaving) == (32, 0)


def test_seals_may_come_before_the_end_of_the_load() -> None:
    rig = stored(TierLimits(cpu_slots=16), CHAIN)
    (device,) = rig.devices
    reserved = device.board(9, CHAIN, load=4)
    assert device.copy_in(Ticket(reserved.ticket)) == 4
    codes = device.apply(seals=[CHAIN.seal(9, reserved.blocks)]).seals
    assert codes == [[OK] * 4]
    counts = device.release(9).counts
    assert (counts.evictable, counts.leaving) == (0, 4)
    device.load(reserved.ticket)
    assert device.apply().counts.evictable == 4


def test_a_load_through_fewer_slots_than_it_has_blocks_is_cut() -> None:
    rig = on_disk(CHAIN, cpu_slots=3)
    device = rig.devices[0]
    assert device.where(CHAIN) == (0, 0, 0)  # the place is farther than the slots reach
    rig = on_disk(prompt(1, 2), prompt(1, 2, 3, 4), cpu_slots=3)
    device = rig.devices[0]
    assert device.where(CHAIN) == (0, 0, 2)
    reserved = device.board(1, CHAIN, load=4)
    assert (reserved.ssd_blocks, len(reserved.blocks)) == (2, 4)
    rig.work()
    assert device.load(reserved.ticket) == 2


def test_more_is_not_good_than_was_offered() -> None:
    rig = on_disk(CHAIN)
    device = rig.devices[0]
    reserved = device.board(1, CHAIN, load=4)
    with pytest.raises(InvalidRequest) as refused:
        device.tell(LoadDone(Ticket(reserved.ticket), 1))
    assert (refused.value.limit, refused.value.value) == ("0", "1")
    device.abort(reserved.ticket)
    rig.work()  # what was being read stays as an entry
    assert rig.devices[1].where(CHAIN) == (0, 4, 0)


def test_an_open_load_is_told_again() -> None:
    rig = on_disk(CHAIN)
    device = rig.devices[0]
    reserved = device.board(1, CHAIN, load=4)
    rig.work(jobs=2)
    rig.work(jobs=1, ok=False)
    events = rig.tiers.open_events(device.owner)
    assert [type(event) for event in events] == [LoadReady, TicketLost]
    assert isinstance(events[0], LoadReady) and len(events[0].slots) == 2
    assert events[1] == TicketLost(Ticket(reserved.ticket), 2)


def test_found_entries_do_not_take_slots_that_are_in_use() -> None:
    rig = on_disk(CHAIN)
    device = rig.devices[0]
    before = rig.tiers.usage().ssd.used
    for slot, (entry, _) in rig.disk.items():
        rig.tiers.found(slot, entry)
        rig.tiers.found(slot + 10, entry)
        rig.tiers.found(1000, entry)
    assert rig.tiers.usage().ssd.used == before == 4
    assert device.where(CHAIN) == (0, 0, 4)


def test_what_was_evicted_from_the_ssd_is_not_found_again_once_it_is_forgotten() -> None:
    chains = [*[prompt(10 * number, 10 * number + 1) for number in range(8)], prompt(99)]
    rig = TierRig(TierLimits(cpu_slots=16, ssd_slots=16))
    device = rig.device(32)
    for number, chain in enumerate(chains, 1):
        device.cache(number, chain)
        rig.idle()
        device.release(number)
    assert len(rig.disk) > rig.tiers.usage().ssd.used  # something stands there that is evicted
    invalidate([device.ledger], [rig.tiers], What(tenant="t"))
    rig.settle()
    rig.idle()
    assert not rig.disk


def test_a_slot_that_a_scan_has_no_use_for_is_erased_with_what_is_forgotten() -> None:
    rig = on_disk(CHAIN)
    (entry, data) = rig.disk[0]
    rig.disk[20] = (entry, data)  # a second one of the same key
    rig.scan()
    invalidate([device.ledger for device in rig.devices], [rig.tiers], What(tenant="t"))
    rig.settle()
    rig.idle()
    assert not rig.disk


def test_what_the_disk_would_not_have_erased_is_erased_later() -> None:
    rig = on_disk(CHAIN)
    invalidate([device.ledger for device in rig.devices], [rig.tiers], What(tenant="t"))
    refused = [job.disk_slot for job in rig.tiers.take_jobs() if isinstance(job, DiskHeader)]
    assert len(refused) == 4
    for slot in refused:
        rig.tiers.unerased(slot)
    rig.devices[0].cache(1, prompt(5))  # something new is written into one of them meanwhile
    rig.idle()
    for _ in range(3):
        rig.tiers.erase_again(2)
        rig.settle()
        rig.idle()
    assert [entry.key for entry, _ in rig.disk.values()] == prompt(5).keys


def test_what_stands_where_a_write_has_failed_is_erased() -> None:
    rig = TierRig(TierLimits(cpu_slots=16, ssd_slots=1))
    device = rig.device(16)
    device.cache(1, prompt(1))
    rig.idle()
    device.release(1)
    device.cache(2, prompt(2))
    device.store()
    assert rig.work(ok=False) == 1
    rig.tiers.erase_again(8)
    rig.settle()
    rig.idle()
    assert not rig.disk


def test_nothing_is_erased_that_is_good() -> None:
    rig = on_disk(CHAIN)
    assert not any(isinstance(job, DiskHeader) and job.entry is None for job in rig.jobs)
