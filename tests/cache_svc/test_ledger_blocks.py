"""The life of a block: grant, bind, seal, release, eviction, generations."""

from __future__ import annotations

import pytest

from cache_svc.blocks import BlockTable
from cache_svc.cost_order import ORDERS
from cache_svc.invalidate import What, invalidate
from cache_svc.ledger import Ledger
from cache_svc.tiers import TierLimits, Tiers
from jitney.block_ops import (
    Batch,
    Bind,
    Block,
    Chain,
    Counts,
    Release,
    RequestId,
    Reserve,
    ResultCode,
    Return,
    Seal,
    Swap,
    Tier,
    Withdraw,
    block_id,
    generation,
)
from jitney.keys import Key
from jitney.ticket_ops import StoreDone, StoreOrder
from tests.support.ledger_rig import BLOCK_TOKENS, OK, Rig, prompt

STALE, NOT_HELD, DUPLICATE = ResultCode.STALE, ResultCode.NOT_HELD, ResultCode.DUPLICATE
A, B = RequestId(1), RequestId(2)


def test_grant_gives_what_there_is() -> None:
    rig = Rig(5)
    assert len(rig.apply(grant=3).granted) == 3
    answer = rig.apply(grant=9)
    assert len(answer.granted) == 2
    assert answer.counts == Counts(0, 0, 0, 5, 5)
    assert rig.apply(grant=1).granted == []


def test_grant_evicts_cached_blocks_and_no_held_ones() -> None:
    rig = Rig(6)
    rig.cache(1, prompt(1, 2, 3))
    rig.cache(2, prompt(7, 8, 9))
    rig.release(1)
    assert len(rig.apply(grant=6).granted) == 3
    assert rig.hits(prompt(1, 2, 3)).device_blocks == 0
    assert rig.hits(prompt(7, 8, 9)).device_blocks == 3


def test_no_handle_is_zero() -> None:
    assert 0 not in Rig(4).apply(grant=4).granted


def test_return_frees_and_makes_the_handle_stale() -> None:
    rig = Rig(3)
    granted = rig.apply(grant=2).granted
    answer = rig.apply(returns=[Return([granted[0], granted[0]])])
    assert answer.returns == [[OK, STALE]]
    assert answer.counts == Counts(2, 0, 0, 1, 3)
    again = rig.apply(grant=2).granted
    old = next(block for block in again if block_id(block) == block_id(granted[0]))
    assert generation(old) == generation(granted[0]) + 1


def test_return_and_bind_of_blocks_that_are_not_granted() -> None:
    rig = Rig(4)
    (mine,) = rig.apply(reserves=[Reserve(A, [], 1)]).reserves[0].blocks
    free = next(handle for handle in rig.ledger.blocks.handle if handle != mine)
    answer = rig.apply(returns=[Return([mine, free])], binds=[Bind(B, [mine, free, Block(free + (7 << 32))])])
    assert answer.returns == [[NOT_HELD, NOT_HELD]]
    assert answer.binds == [[NOT_HELD, NOT_HELD, STALE]]
    assert B not in rig.ledger.requests


def test_a_bound_block_is_sealed_and_found() -> None:
    rig, wanted = Rig(4), prompt(1)
    granted = rig.apply(grant=1).granted
    answer = rig.apply(binds=[Bind(A, granted)])
    assert answer.binds == [[OK]]
    assert answer.counts == Counts(3, 0, 0, 0, 4)
    assert rig.hits(wanted).device_blocks == 0
    assert rig.apply(seals=[wanted.seal(1, granted)]).seals == [[OK]]
    assert rig.hits(wanted).device_blocks == 1


def test_grant_in_the_batch_of_its_return() -> None:
    rig = Rig(1)
    first = rig.apply(grant=1).granted
    answer = rig.apply(returns=[Return(first)], grant=1)
    assert answer.returns == [[OK]]
    assert len(answer.granted) == 1
    assert answer.granted != first


def test_release_of_sealed_blocks_leaves_them_cached() -> None:
    rig, wanted = Rig(4), prompt(1, 2, 3)
    blocks = rig.cache(1, wanted)
    answer = rig.release(1)
    assert answer.releases == [[OK]]
    assert answer.counts == Counts(1, 3, 0, 0, 4)
    hits = rig.hits(wanted)
    assert (hits.device_blocks, hits.unheld_blocks) == (3, 3)
    assert rig.board(2, wanted).acquires[0].blocks == blocks
    assert rig.hits(wanted).unheld_blocks == 0


def test_release_of_unsealed_blocks_frees_them() -> None:
    rig, wanted = Rig(4), prompt(1, 2, 3)
    blocks = rig.board(1, wanted, extra=1).reserves[0].blocks
    assert rig.hits(wanted).pending_blocks == 3
    answer = rig.release(1)
    assert answer.counts == Counts(4, 0, 0, 0, 4)
    assert rig.hits(wanted).pending_blocks == 0
    assert rig.apply(releases=[Release(A, blocks)], seals=[wanted.seal(1, blocks[:3])]).seals == [[STALE] * 3]


def test_release_of_named_blocks() -> None:
    rig, wanted = Rig(5), prompt(1, 2)
    sealed = rig.cache(1, wanted)
    (private,) = rig.apply(reserves=[Reserve(A, [], 3)]).reserves[0].blocks
    answer = rig.apply(releases=[Release(A, [private, sealed[1], sealed[1]]), Release(B, [sealed[0]])])
    assert answer.releases == [[OK, OK, NOT_HELD], [NOT_HELD]]
    assert answer.counts == Counts(3, 1, 0, 0, 5)
    assert rig.release(1).counts == Counts(3, 2, 0, 0, 5)


def test_release_of_an_unknown_request() -> None:
    assert Rig(2).release(1).releases == [[NOT_HELD]]


def test_two_releases_of_one_request_in_one_batch() -> None:
    rig = Rig(2)
    rig.cache(1, prompt(1))
    assert rig.release(1, 1).releases == [[OK], [NOT_HELD]]


def test_the_second_seal_of_a_key_stays_private() -> None:
    rig, wanted = Rig(6), prompt(1, 2)
    first = rig.apply(reserves=[Reserve(A, [], 2)]).reserves[0].blocks
    second = rig.apply(reserves=[Reserve(B, [], 2)]).reserves[0].blocks
    answer = rig.apply(seals=[wanted.seal(1, first), wanted.seal(2, second)])
    assert answer.seals == [[OK, OK], [DUPLICATE, DUPLICATE]]
    assert rig.board(3, wanted).acquires[0].blocks == first
    assert rig.release(2).counts == Counts(4, 0, 0, 0, 6)


def test_a_seal_behind_a_private_block_pins_the_sealed_one() -> None:
    """Request 2's first block stayed private; the block that it seals behind keeps the other's from eviction."""
    rig, wanted = Rig(4), prompt(1, 2)
    first = rig.apply(reserves=[Reserve(A, [], 1), Reserve(B, [], 2)])
    one, two = first.reserves[0].blocks, first.reserves[1].blocks
    assert rig.apply(seals=[prompt(1).seal(1, one), wanted.seal(2, two)]).seals == [[OK], [DUPLICATE, OK]]
    assert rig.release(1).counts == Counts(1, 0, 0, 0, 4)
    assert len(rig.apply(grant=4).granted) == 1
    assert rig.hits(wanted).device_blocks == 2
    assert rig.release(2).counts == Counts(1, 2, 0, 1, 4)


def test_a_seal_behind_cached_blocks_takes_them_out_of_the_order() -> None:
    rig, wanted = Rig(5), prompt(1, 2, 3)
    reserved = rig.apply(reserves=[Reserve(A, [], 2), Reserve(B, [], 3)])
    one, two = reserved.reserves[0].blocks, reserved.reserves[1].blocks
    rig.apply(seals=[prompt(1, 2).seal(1, one), prompt(1, 2).seal(2, two[:2])])
    assert rig.release(1).counts == Counts(0, 2, 0, 0, 5)
    assert rig.apply(seals=[wanted.seal(2, two[2:], 2)]).counts == Counts(0, 0, 0, 0, 5)
    assert rig.apply(grant=1).granted == []
    assert rig.release(2).counts == Counts(2, 3, 0, 0, 5)


def test_a_block_whose_parent_is_gone_is_found_again_when_the_parent_is() -> None:
    rig, wanted = Rig(4), prompt(1, 2)
    reserved = rig.apply(reserves=[Reserve(A, [], 1), Reserve(B, [], 2)])
    one, two = reserved.reserves[0].blocks, reserved.reserves[1].blocks
    rig.apply(seals=[prompt(1).seal(1, one), prompt(1).seal(2, two[:1])])
    rig.release(1)
    rig.apply(grant=2)
    assert rig.hits(wanted).device_blocks == 0
    assert rig.apply(seals=[wanted.seal(2, two[1:], 1)]).seals == [[OK]]
    assert rig.hits(wanted).device_blocks == 0
    assert rig.apply(seals=[wanted.seal(2, two[:1])]).seals == [[OK]]
    assert rig.hits(wanted).device_blocks == 2
    assert rig.release(2).counts == Counts(0, 2, 0, 2, 4)


@pytest.mark.parametrize("order", ["lru", "cost"])
@pytest.mark.parametrize("circle", [1, 2, 3])
def test_keys_in_a_circle_do_harm_to_nobody(order: str, circle: int) -> None:
    tiers = Tiers(TierLimits(cpu_slots=4, ssd_slots=4), eviction=ORDERS[order])
    ledger = Ledger(BlockTable(4, order=ORDERS[order]), BLOCK_TOKENS, tiers)
    keys = [Key(bytes([number]) * 32) for number in range(circle)]
    blocks = ledger.apply(Batch(1, reserves=[Reserve(A, keys, circle), Reserve(B, prompt(7).keys, 1)])).reserves
    one, other = blocks[0].blocks, blocks[1].blocks
    seals = [
        Seal(A, [block], [key], keys[at - 1], bytes(4 * BLOCK_TOKENS), "t", b"", "m")
        for at, (block, key) in enumerate(zip(one, keys, strict=True))
    ]
    ledger.apply(Batch(2, seals=[*seals, prompt(7).seal(2, other)], swaps=[Swap(A, Tier.CPU)]))
    for event in tiers.take_events(("", 0)):
        assert isinstance(event, StoreOrder)
        tiers.told(("", 0), StoreDone(event.ticket, [0] * len(event.blocks)))
    ledger.apply(Batch(3, releases=[Release(A)]))
    assert ledger.apply(Batch(4, grant=4)).counts.granted == 3  # every block of the circle can be had again
    assert ledger.lookup(Chain(A, keys)).cpu_blocks == circle
    assert invalidate([ledger], [tiers], What(prefix_key=keys[0])).cpu == circle
    assert ledger.lookup(Chain(A, prompt(7).keys)).device_blocks == 1


def test_seal_of_what_the_request_does_not_hold() -> None:
    rig, wanted = Rig(4), prompt(1)
    (block,) = rig.apply(reserves=[Reserve(A, [], 1)]).reserves[0].blocks
    answer = rig.apply(seals=[wanted.seal(2, [block]), wanted.seal(1, [Block(block + (1 << 32))])])
    assert answer.seals == [[NOT_HELD], [STALE]]
    assert rig.hits(wanted).device_blocks == 0


def test_a_seal_repeated_with_its_own_key_is_fine_and_with_another_is_not() -> None:
    rig = Rig(4)
    (block,) = rig.cache(1, prompt(1))
    answer = rig.apply(seals=[prompt(1).seal(1, [block]), prompt(2).seal(1, [block])])
    assert answer.seals == [[OK], [NOT_HELD]]
    assert rig.hits(prompt(2)).device_blocks == 0


def test_a_block_sealed_under_another_key_than_it_was_reserved_for() -> None:
    rig = Rig(4)
    (block,) = rig.board(1, prompt(1)).reserves[0].blocks
    assert rig.board(2, prompt(1)).acquires[0].joined == 1
    answer = rig.apply(seals=[prompt(5).seal(1, [block])])
    assert answer.seals == [[OK]]
    assert [(event.request, event.withdrawn) for event in answer.joins] == [(2, 1)]
    assert rig.hits(prompt(1)).pending_blocks == 0
    assert rig.hits(prompt(5)).device_blocks == 1


def test_withdraw_leaves_the_blocks_private() -> None:
    rig, wanted = Rig(4), prompt(1, 2)
    rig.board(1, wanted)
    answer = rig.apply(withdraws=[Withdraw(A), Withdraw(B)])
    assert answer.withdraws == [OK, NOT_HELD]
    assert answer.counts.free == 2
    assert rig.hits(wanted).pending_blocks == 0


def test_leaves_are_evicted_before_parents_and_the_oldest_chain_first() -> None:
    rig = Rig(6)
    rig.cache(1, prompt(1, 2, 3))
    rig.cache(2, prompt(1, 2, 4))
    rig.cache(3, prompt(5, 6))
    rig.release(1)
    rig.release(3)
    rig.release(2)
    left = []
    for _ in range(6):
        rig.apply(grant=1)
        left.append([rig.hits(p).device_blocks for p in (prompt(1, 2, 3), prompt(1, 2, 4), prompt(5, 6))])
    assert left == [[2, 3, 2], [2, 3, 1], [2, 3, 0], [2, 2, 0], [1, 1, 0], [0, 0, 0]]


def test_use_makes_a_chain_young_again() -> None:
    rig = Rig(4)
    rig.cache(1, prompt(1, 2))
    rig.cache(2, prompt(5, 6))
    rig.release(1)
    rig.release(2)
    rig.board(3, prompt(1, 2))
    rig.release(3)
    rig.apply(grant=2)
    assert rig.hits(prompt(1, 2)).device_blocks == 2
    assert rig.hits(prompt(5, 6)).device_blocks == 0


def test_a_parent_of_a_held_block_is_never_evicted() -> None:
    rig = Rig(5)
    rig.cache(1, prompt(1, 2, 3))
    rig.apply(releases=[Release(A, rig.ledger.blocks.handle[:1])])
    first = next(iter(rig.ledger.requests[A].blocks))
    rig.apply(releases=[Release(A, [rig.ledger.blocks.handle[first]])])
    rig.apply(grant=5)
    assert rig.hits(prompt(1, 2, 3)).device_blocks == 3


def test_a_freed_key_is_not_found() -> None:
    rig = Rig(3)
    rig.cache(1, prompt(1, 2, 3))
    rig.release(1)
    rig.cache(2, prompt(7, 8))
    assert rig.hits(prompt(1, 2, 3)).device_blocks == 1
    assert rig.ledger.blocks.evicted == 2


@pytest.mark.parametrize("salt", ["", "tenant-b"])
def test_salts_never_share(salt: str) -> None:
    rig = Rig(4)
    rig.cache(1, prompt(1, 2, salt="tenant-a"))
    assert rig.hits(prompt(1, 2, salt=salt)).device_blocks == 0
