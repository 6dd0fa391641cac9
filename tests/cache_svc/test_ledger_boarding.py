"""Acquire and Reserve: hits, joins, shortfalls, and who owns a pending key."""

from __future__ import annotations

from typing import Any

import pytest

from jitney.block_ops import Acquire, Counts, Release, RequestId, Reserve, ResultCode, Withdraw
from tests.support.ledger_rig import OK, Prompt, Rig, boarding, prompt

SHORT, LOST, SKIPPED = ResultCode.SHORT, ResultCode.LOST, ResultCode.SKIPPED
DUPLICATE = ResultCode.DUPLICATE
A, B, C = RequestId(1), RequestId(2), RequestId(3)


def _held(rig: Rig, request: int) -> int:
    holding = rig.ledger.requests.get(RequestId(request))
    return 0 if holding is None else len(holding.blocks)


def test_a_new_prompt_gets_all_its_blocks_at_once() -> None:
    rig, wanted = Rig(8), prompt(1, 2, 3)
    answer = rig.board(1, wanted, extra=2)
    assert answer.acquires[0].code is OK
    assert answer.acquires[0].blocks == []
    assert len(answer.reserves[0].blocks) == 5
    assert answer.counts == Counts(3, 0, 0, 0, 8)
    hits = rig.hits(wanted)
    assert (hits.device_blocks, hits.pending_blocks, hits.pending_owner) == (0, 3, 1)


def test_a_partial_hit_reserves_the_rest() -> None:
    rig = Rig(8)
    cached = rig.cache(1, prompt(1, 2, 3))
    answer = rig.board(2, prompt(1, 2, 9), extra=1)
    assert answer.acquires[0].blocks == cached[:2]
    assert len(answer.reserves[0].blocks) == 2
    assert rig.ledger.hit_blocks == 2


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_wholly_cached_prompt_needs_no_block(blocks: int) -> None:
    """Its last token runs as a query only: the ledger gives the whole chain and nothing to write to."""
    rig, wanted = Rig(6), prompt(*range(blocks))
    cached = rig.cache(1, wanted)
    rig.release(1)
    for request in (2, 3):
        answer = rig.board(request, wanted)
        assert answer.acquires[0].blocks == cached
        assert answer.reserves[0].code is OK
        assert answer.reserves[0].blocks == []
    assert rig.release(2, 3).counts == Counts(6 - blocks, blocks, 0, 0, 6)


def test_a_wholly_cached_prompt_in_a_full_pool() -> None:
    rig, wanted = Rig(3), prompt(1, 2, 3)
    rig.cache(1, wanted)
    rig.release(1)
    assert rig.board(2, wanted).reserves[0].code is OK
    assert rig.board(3, wanted, extra=1).reserves[0].code is SHORT
    assert _held(rig, 2) == 3


def test_short_reserve_holds_nothing_and_leaves_neighbours_alone() -> None:
    rig = Rig(4)
    rig.cache(1, prompt(1, 2))
    rig.release(1)
    answer = rig.apply(**boarding((2, prompt(1, 2, 3, 4, 5, 6), 0), (3, prompt(7), 0)))
    assert answer.acquires[0].code is OK
    assert answer.acquires[0].blocks == []
    assert answer.reserves[0].code is SHORT
    assert answer.reserves[0].short_by == 2
    assert answer.reserves[1].code is OK
    assert B not in rig.ledger.requests
    assert answer.counts == Counts(1, 2, 0, 0, 4)
    assert rig.hits(prompt(1, 2, 3)).pending_blocks == 0


def test_a_reserve_of_exactly_what_there_is() -> None:
    rig = Rig(4)
    rig.cache(1, prompt(1, 2))
    rig.release(1)
    assert rig.board(2, prompt(5, 6, 7, 8)).reserves[0].code is OK
    assert rig.release(2).counts.free == 4


def test_a_lost_acquire_skips_the_reserve() -> None:
    rig, wanted = Rig(6), prompt(1, 2, 3)
    rig.cache(1, prompt(1, 2))
    answer = rig.apply(acquires=[Acquire(B, wanted.keys, 3)], reserves=[Reserve(B, wanted.keys, 3)])
    assert answer.acquires[0].code is LOST
    assert answer.acquires[0].blocks == []
    assert answer.reserves[0].code is SKIPPED
    assert B not in rig.ledger.requests
    assert rig.apply(acquires=[Acquire(B, wanted.keys, 2)]).acquires[0].code is OK


def test_hits_of_a_later_acquire_are_not_evicted_by_an_earlier_reserve() -> None:
    rig = Rig(4)
    cached = rig.cache(1, prompt(1, 2))
    rig.release(1)
    answer = rig.apply(**boarding((2, prompt(5, 6, 7), 0), (3, prompt(1, 2), 0)))
    assert answer.reserves[0].code is SHORT
    assert answer.acquires[1].blocks == cached


def test_what_a_batch_releases_it_may_reserve() -> None:
    rig = Rig(3)
    rig.board(1, prompt(1, 2, 3))
    answer = rig.apply(releases=[Release(A)], **boarding((2, prompt(7, 8, 9), 0)))
    assert answer.reserves[0].code is OK


def test_an_acquire_is_idempotent_and_goes_on_behind_what_is_held() -> None:
    rig, wanted = Rig(8), prompt(1, 2, 3, 4)
    cached = rig.cache(1, prompt(1, 2, 3))
    assert rig.apply(acquires=[Acquire(B, wanted.keys[:1])]).acquires[0].blocks == cached[:1]
    for _ in range(2):
        result = rig.apply(acquires=[Acquire(B, wanted.keys)]).acquires[0]
        assert result.blocks == cached
    assert rig.ledger.blocks.holders[cached[0] & 0xFFFFFFFF] == 2
    rig.release(1, 2)


def test_joining_waits_for_the_owner_and_holds_when_it_seals() -> None:
    rig, wanted = Rig(8), prompt(1, 2, 3)
    blocks = rig.board(1, wanted).reserves[0].blocks
    answer = rig.board(2, prompt(1, 2, 9), extra=1)
    assert (answer.acquires[0].joined, answer.acquires[0].owner) == (2, A)
    assert len(answer.reserves[0].blocks) == 2
    first = rig.apply(seals=[prompt(1).seal(1, blocks[:1])])
    assert [(e.request, list(e.blocks), e.withdrawn) for e in first.joins] == [(2, blocks[:1], 0)]
    second = rig.apply(seals=[wanted.seal(1, blocks[1:], 1)])
    assert [(e.request, list(e.blocks), e.withdrawn) for e in second.joins] == [(2, blocks[1:2], 0)]
    assert rig.release(1).counts.evictable == 1


def test_thirty_two_requests_join_one_prefix() -> None:
    rig, system = Rig(64), prompt(1, 2, 3, 4)
    owner = rig.board(1, system).reserves[0].blocks
    joiners = [prompt(1, 2, 3, 4, 100 + n) for n in range(32)]
    answer = rig.apply(**boarding(*((10 + n, each, 0) for n, each in enumerate(joiners))))
    assert [result.joined for result in answer.acquires] == [4] * 32
    assert [len(result.blocks) for result in answer.reserves] == [1] * 32
    sealed = rig.apply(seals=[system.seal(1, owner)])
    assert [list(event.blocks) for event in sealed.joins] == [owner] * 32
    assert rig.ledger.blocks.holders[owner[0] & 0xFFFFFFFF] == 33
    answer = rig.release(1, *range(10, 42))
    assert answer.counts == Counts(60, 4, 0, 0, 64)


def test_requests_of_one_batch_join_each_other() -> None:
    rig = Rig(16)
    answer = rig.apply(**boarding(*((n, prompt(1, 2, 10 + n), 0) for n in (1, 2, 3))))
    assert [result.joined for result in answer.acquires] == [0, 2, 2]
    assert [result.owner for result in answer.acquires] == [0, 1, 1]
    assert [len(result.blocks) for result in answer.reserves] == [3, 1, 1]


def test_a_joiner_may_own_keys_that_others_join() -> None:
    rig = Rig(16)
    one = rig.board(1, prompt(1, 2)).reserves[0].blocks
    two = rig.board(2, prompt(1, 2, 3, 4)).reserves[0].blocks
    result = rig.board(3, prompt(1, 2, 3, 4, 5)).acquires[0]
    assert (result.joined, result.owner) == (4, A)
    assert len(rig.apply(seals=[prompt(1, 2).seal(1, one)]).joins) == 2
    answer = rig.apply(seals=[prompt(1, 2, 3, 4).seal(2, two, 2)])
    assert [(e.request, list(e.blocks)) for e in answer.joins] == [(3, two)]


@pytest.mark.parametrize("how", ["release", "withdraw", "release blocks"])
def test_an_owner_that_stops_passes_on_to_the_first_that_reserves(how: str) -> None:
    rig, wanted = Rig(12), prompt(1, 2, 3)
    blocks = rig.board(1, wanted).reserves[0].blocks
    rig.board(2, prompt(1, 2, 3, 8))
    rig.board(3, prompt(1, 2, 3, 9))
    stops: dict[str, dict[str, Any]] = {
        "release": {"releases": [Release(A)]},
        "withdraw": {"withdraws": [Withdraw(A)]},
        "release blocks": {"releases": [Release(A, blocks[:1])]},
    }
    answer = rig.apply(**stops[how])
    assert [(e.request, e.withdrawn) for e in answer.joins] == [(2, 3), (3, 3)]
    again = rig.apply(**boarding((2, prompt(1, 2, 3, 8), 0), (3, prompt(1, 2, 3, 9), 0)))
    assert [len(result.blocks) for result in again.reserves] == [3, 0]
    assert [(result.joined, result.owner) for result in again.acquires] == [(0, 0), (3, 2)]
    sealed = rig.apply(seals=[wanted.seal(2, again.reserves[0].blocks)])
    assert [(e.request, len(e.blocks)) for e in sealed.joins] == [(3, 3)]


def test_part_of_a_prefix_was_sealed_when_its_owner_stops() -> None:
    rig, wanted = Rig(12), prompt(1, 2, 3)
    blocks = rig.board(1, wanted).reserves[0].blocks
    mine = rig.board(2, prompt(1, 2, 3, 8)).reserves[0].blocks
    answer = rig.apply(seals=[prompt(1).seal(1, blocks[:1])], releases=[Release(A)])
    (event,) = answer.joins
    assert (list(event.blocks), event.withdrawn) == (blocks[:1], 2)
    again = rig.board(2, prompt(1, 2, 3, 8))
    assert again.acquires[0].blocks == blocks[:1]
    assert len(again.reserves[0].blocks) == 2
    chain = [*blocks[:1], *again.reserves[0].blocks, *mine]
    assert rig.apply(seals=[prompt(1, 2, 3, 8).seal(2, chain[1:], 1)]).seals == [[OK] * 3]
    assert rig.hits(prompt(1, 2, 3, 8)).device_blocks == 4


def test_a_join_ends_as_a_whole_though_another_owns_its_end() -> None:
    """Request 3 waits for 1 and for 2 behind it. When 1 stops, nothing is left that it could wait for in order."""
    rig = Rig(16)
    rig.board(1, prompt(1, 2))
    rig.board(2, prompt(1, 2, 3))
    assert rig.board(3, prompt(1, 2, 3)).acquires[0].joined == 3
    answer = rig.release(1)
    assert [(e.request, e.withdrawn) for e in answer.joins] == [(2, 2), (3, 3)]
    again = rig.apply(**boarding((2, prompt(1, 2, 3), 0), (3, prompt(1, 2, 3), 0)))
    assert (again.acquires[1].joined, again.acquires[1].owner) == (3, 2)


def test_an_aborted_joiner_is_forgotten() -> None:
    rig, wanted = Rig(8), prompt(1, 2)
    blocks = rig.board(1, wanted).reserves[0].blocks
    rig.board(2, wanted)
    rig.release(2)
    assert rig.apply(seals=[wanted.seal(1, blocks)]).joins == []
    assert rig.release(1).counts == Counts(6, 2, 0, 0, 8)


def test_events_of_a_request_that_leaves_in_the_same_batch_are_not_told() -> None:
    rig, wanted = Rig(8), prompt(1, 2)
    rig.board(1, wanted)
    rig.board(2, wanted)
    assert rig.release(1, 2).joins == []


def test_an_acquire_in_the_batch_of_the_withdrawal_says_it_all() -> None:
    rig, wanted = Rig(8), prompt(1, 2)
    rig.board(1, wanted)
    rig.board(2, wanted)
    answer = rig.apply(releases=[Release(A)], **boarding((2, wanted, 0)))
    assert answer.joins == []
    assert answer.acquires[0].joined == 0
    assert len(answer.reserves[0].blocks) == 2


def test_a_shortfall_takes_joins_of_the_same_batch_with_it() -> None:
    """Request 2 owns the middle of a chain whose start it had joined; when its second boarding falls short, whoever
    has joined it is told, or gets the blocks itself if its own Reserve comes later."""
    rig = Rig(6)
    rig.board(1, prompt(1, 2))
    rig.board(2, prompt(1, 2, 3))
    rig.release(1)
    rig.apply(grant=2)
    wide = prompt(1, 2, 3, 4, 5, 6)
    answer = rig.apply(
        acquires=[Acquire(B, wide.keys), Acquire(C, wide.keys[:3])],
        reserves=[Reserve(B, wide.keys, 6), Reserve(C, wide.keys[:3], 3)],
    )
    assert answer.reserves[0].code is SHORT
    assert answer.reserves[0].short_by == 2
    assert answer.acquires[1].joined == 0
    assert len(answer.reserves[1].blocks) == 3
    assert answer.joins == []


def test_a_shortfall_after_the_joiners_reserve_is_told() -> None:
    rig = Rig(6)
    rig.board(1, prompt(1, 2))
    rig.board(2, prompt(1, 2, 3))
    rig.release(1)
    blocks = rig.board(3, prompt(1, 2)).reserves[0].blocks
    rig.apply(seals=[prompt(1, 2).seal(3, blocks)])
    wide = prompt(1, 2, 3, 4, 5, 6, 7)
    answer = rig.apply(
        acquires=[Acquire(B, wide.keys), Acquire(C, wide.keys[:3])],
        reserves=[Reserve(C, wide.keys[:3], 3), Reserve(B, wide.keys, 7)],
    )
    assert [result.code for result in answer.reserves] == [OK, SHORT]
    assert (answer.acquires[1].joined, answer.acquires[1].owner) == (1, 2)
    assert [(e.request, list(e.blocks), e.withdrawn) for e in answer.joins] == [(3, [], 1)]


def test_a_race_without_a_join_leaves_the_slower_block_private() -> None:
    rig, wanted = Rig(8), prompt(1, 2)
    one = rig.board(1, wanted).reserves[0].blocks
    two = rig.apply(reserves=[Reserve(B, wanted.keys, 2)]).reserves[0].blocks
    assert rig.hits(wanted).pending_owner == A
    answer = rig.apply(seals=[wanted.seal(2, two)])
    assert answer.seals == [[OK, OK]]
    assert rig.hits(wanted).pending_blocks == 0
    assert rig.apply(seals=[wanted.seal(1, one)]).seals == [[DUPLICATE, DUPLICATE]]
    assert rig.release(1, 2).counts == Counts(6, 2, 0, 0, 8)


def test_a_racer_serves_the_joiners_too() -> None:
    rig, wanted = Rig(8), prompt(1)
    rig.board(1, wanted)
    two = rig.apply(reserves=[Reserve(B, wanted.keys, 1)]).reserves[0].blocks
    rig.board(3, wanted)
    answer = rig.apply(seals=[wanted.seal(2, two)])
    assert [(e.request, list(e.blocks)) for e in answer.joins] == [(3, two)]


def test_a_reserve_names_what_is_sealed_but_not_held() -> None:
    rig, wanted = Rig(8), prompt(1, 2)
    rig.cache(1, wanted)
    blocks = rig.apply(reserves=[Reserve(B, wanted.keys, 2)]).reserves[0].blocks
    assert len(blocks) == 2
    assert rig.apply(seals=[wanted.seal(2, blocks)]).seals == [[DUPLICATE, DUPLICATE]]


def test_a_reserve_repeated_in_a_later_batch_adds_nothing() -> None:
    rig, wanted = Rig(8), prompt(1, 2)
    rig.board(1, wanted, extra=1)
    answer = rig.board(1, wanted, extra=1)
    assert answer.reserves[0].blocks == []
    assert answer.acquires[0].joined == 0
    assert answer.counts.free == 5


def test_a_request_that_wants_nothing_is_not_kept() -> None:
    rig = Rig(2)
    rig.board(1, Prompt(prompt().tokens))
    assert rig.ledger.requests == {}


def test_lookup_has_no_side_effects() -> None:
    rig, wanted = Rig(8), prompt(1, 2, 3)
    rig.cache(1, prompt(1))
    rig.board(2, prompt(1, 2))
    hits = rig.hits(wanted)
    assert (hits.device_blocks, hits.unheld_blocks, hits.pending_blocks, hits.pending_owner) == (1, 0, 1, 2)
    assert (hits.cpu_blocks, hits.ssd_blocks) == (0, 0)
    assert rig.hits(wanted) == hits
    assert rig.hits(wanted, request=2).pending_blocks == 0


def test_a_joiner_that_seals_the_key_itself_holds_one_block() -> None:
    rig, wanted = Rig(8), prompt(1)
    rig.board(1, wanted)
    (mine,) = rig.board(2, wanted, extra=1).reserves[0].blocks
    assert rig.apply(seals=[wanted.seal(2, [mine])]).seals == [[OK]]
    assert rig.ledger.blocks.holders[mine & 0xFFFFFFFF] == 1
    assert rig.release(2).counts == Counts(6, 1, 0, 0, 8)
