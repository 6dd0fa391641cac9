"""Copy-on-write: a partly filled block that several requests hold is never written by one of them."""

from __future__ import annotations

from jitney.block_ops import Block, Counts, Fork, Release, RequestId, Reserve, ResultCode, Share
from tests.support.ledger_rig import OK, Rig, prompt

STALE, NOT_HELD = ResultCode.STALE, ResultCode.NOT_HELD
A, B, C = RequestId(1), RequestId(2), RequestId(3)


def _shared(rig: Rig) -> Block:
    (block,) = rig.apply(reserves=[Reserve(A, [], 1)]).reserves[0].blocks
    assert rig.apply(shares=[Share(block, [B, C])]).shares == [OK]
    return block


def test_each_holder_but_the_last_gets_a_copy() -> None:
    rig = Rig(4)
    block = _shared(rig)
    answer = rig.apply(forks=[Fork(B, block), Fork(C, block), Fork(A, block)])
    assert [result.code for result in answer.forks] == [OK, OK, ResultCode.IN_PLACE]
    copies = {answer.forks[0].block, answer.forks[1].block}
    assert len(copies) == 2 and block not in copies and 0 not in copies
    assert answer.counts == Counts(1, 0, 0, 0, 4)


def test_a_shared_block_cannot_be_sealed() -> None:
    rig = Rig(4)
    block = _shared(rig)
    assert rig.apply(seals=[prompt(1).seal(1, [block])]).seals == [[NOT_HELD]]
    rig.release(2, 3)
    assert rig.apply(seals=[prompt(1).seal(1, [block])]).seals == [[OK]]


def test_the_last_release_frees_it() -> None:
    rig = Rig(4)
    _shared(rig)
    assert rig.release(1, 2).counts.free == 3
    assert rig.release(3).counts.free == 4


def test_sharing_twice_counts_once() -> None:
    rig = Rig(4)
    block = _shared(rig)
    rig.apply(shares=[Share(block, [B, A, B])])
    assert rig.ledger.blocks.holders[block & 0xFFFFFFFF] == 3


def test_no_room_for_a_copy() -> None:
    rig = Rig(1)
    block = _shared(rig)
    answer = rig.apply(forks=[Fork(B, block)])
    assert answer.forks[0].code is ResultCode.SHORT
    assert rig.ledger.blocks.holders[block & 0xFFFFFFFF] == 3


def test_a_copy_of_a_sealed_block_is_never_in_place() -> None:
    rig = Rig(3)
    (block,) = rig.cache(1, prompt(1))
    answer = rig.apply(forks=[Fork(A, block)])
    assert answer.forks[0].code is OK
    assert answer.counts == Counts(1, 1, 0, 0, 3)


def test_forks_and_shares_that_cannot_be() -> None:
    rig = Rig(6)
    (granted,) = rig.apply(grant=1).granted
    (sealed,) = rig.cache(1, prompt(1))
    pending = rig.board(1, prompt(1, 2)).reserves[0].blocks[0]
    old = Block(sealed + (1 << 32))
    answer = rig.apply(
        shares=[Share(granted, [B]), Share(sealed, [B]), Share(pending, [B]), Share(old, [B])],
        forks=[Fork(B, sealed), Fork(A, old), Fork(A, granted)],
        releases=[Release(C)],
    )
    assert answer.shares == [NOT_HELD, NOT_HELD, NOT_HELD, STALE]
    assert [result.code for result in answer.forks] == [NOT_HELD, STALE, NOT_HELD]
    assert B not in rig.ledger.requests
