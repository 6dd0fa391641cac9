"""A restarted cache knows again who holds, computes and waits for what."""

from __future__ import annotations

from cache_svc.audit import audit
from cache_svc.redeclare import restored
from jitney.block_ops import Batch, Block, BlockState, Chain, Counts, DeclaredBlock, Release, RequestId, block_id
from tests.support.ledger_rig import BLOCK_TOKENS, OK, Prompt, boarding, prompt

A, B, C = RequestId(1), RequestId(2), RequestId(3)


def handle(block: int, generation: int = 5) -> Block:
    return Block(generation << 32 | block)


def sealed(wanted: Prompt, at: int, block: Block, *holders: RequestId) -> DeclaredBlock:
    seal = wanted.seal(1, [block], at)
    return DeclaredBlock(
        block, BlockState.SEALED, seal.keys[0], seal.parent, seal.token_ids, "t", b"s", "m", holders=holders
    )


def test_nothing_declared_is_an_empty_pool() -> None:
    ledger = restored(4, BLOCK_TOKENS, [])
    assert ledger.blocks.counts() == Counts(4, 0, 0, 0, 4)
    assert audit(ledger) == []


def test_states_holders_and_handles_survive() -> None:
    wanted = prompt(1, 2)
    ledger = restored(
        8,
        BLOCK_TOKENS,
        [
            sealed(wanted, 1, handle(3), A, B),  # a child before its parent
            DeclaredBlock(handle(0, 9), BlockState.GRANTED),
            sealed(wanted, 0, handle(5), A, B, C),
            DeclaredBlock(handle(6), BlockState.WRITING, holders=[A]),
        ],
    )
    assert audit(ledger) == []
    assert ledger.blocks.counts() == Counts(4, 0, 0, 1, 8)
    assert ledger.apply(Batch(1, releases=[Release(A), Release(B)])).counts == Counts(5, 1, 0, 1, 8)
    hits = ledger.lookup(Chain(C, wanted.keys))
    assert (hits.device_blocks, hits.unheld_blocks) == (2, 1)
    new = ledger.apply(Batch(2, grant=5)).granted
    assert all(block >> 32 > 9 or block_id(block) == 6 for block in new)
    assert audit(ledger) == []


def test_pending_keys_owners_and_joiners_survive() -> None:
    wanted, behind = prompt(1, 2), prompt(1, 2, 3)
    first, second = wanted.keys
    ledger = restored(
        8,
        BLOCK_TOKENS,
        [
            DeclaredBlock(handle(1), BlockState.WRITING, second, first, holders=[A], joiners=[B]),
            DeclaredBlock(handle(0), BlockState.WRITING, first, wanted.root, holders=[A], joiners=[B]),
            DeclaredBlock(handle(2), BlockState.WRITING, behind.keys[2], second, holders=[B]),
        ],
    )
    assert audit(ledger) == []
    assert ledger.lookup(Chain(C, behind.keys)).pending_blocks == 3
    answer = ledger.apply(Batch(1, seals=[wanted.seal(1, [handle(0), handle(1)])]))
    assert [(e.request, list(e.blocks)) for e in answer.joins] == [(2, [handle(0), handle(1)])]
    assert ledger.apply(Batch(2, seals=[behind.seal(2, [handle(2)], 2)])).seals == [[OK]]
    assert audit(ledger) == []


def test_an_owner_that_stops_after_the_restart_passes_on() -> None:
    wanted = prompt(1)
    ledger = restored(
        4,
        BLOCK_TOKENS,
        [DeclaredBlock(handle(0), BlockState.WRITING, wanted.keys[0], wanted.root, holders=[A], joiners=[B])],
    )
    answer = ledger.apply(Batch(1, releases=[Release(A)]))
    assert [(e.request, e.withdrawn) for e in answer.joins] == [(2, 1)]
    assert ledger.apply(Batch(2, **boarding((2, wanted, 0)))).reserves[0].code is OK
    assert audit(ledger) == []


def test_two_blocks_of_one_key() -> None:
    """The Seal of the second was on the way when the cache died, so that the executor takes both for sealed."""
    wanted = prompt(1)
    ledger = restored(4, BLOCK_TOKENS, [sealed(wanted, 0, handle(0), A), sealed(wanted, 0, handle(1), B)])
    assert audit(ledger) == []
    assert ledger.apply(Batch(1, releases=[Release(B)])).counts == Counts(3, 0, 0, 0, 4)
    assert ledger.apply(Batch(2, releases=[Release(A)])).counts == Counts(3, 1, 0, 0, 4)
    assert audit(ledger) == []


def test_a_joiner_of_a_key_that_was_sealed_is_told_with_the_first_answer() -> None:
    wanted = prompt(1)
    ledger = restored(
        4,
        BLOCK_TOKENS,
        [
            sealed(wanted, 0, handle(0), A),
            DeclaredBlock(handle(1), BlockState.WRITING, wanted.keys[0], wanted.root, holders=[C], joiners=[B]),
        ],
    )
    assert audit(ledger) == []
    assert [(e.request, list(e.blocks)) for e in ledger.apply(Batch(1)).joins] == [(2, [handle(0)])]


def test_sealed_blocks_without_holders_are_cached() -> None:
    wanted = prompt(1)
    ledger = restored(4, BLOCK_TOKENS, [sealed(wanted, 0, handle(0)), sealed(wanted, 0, handle(1))])
    assert ledger.blocks.counts() == Counts(3, 1, 0, 0, 4)
    assert audit(ledger) == []


def test_a_shared_block_keeps_its_holders() -> None:
    ledger = restored(4, BLOCK_TOKENS, [DeclaredBlock(handle(0), BlockState.WRITING, holders=[A, B, C])])
    assert audit(ledger) == []
    assert ledger.apply(Batch(1, releases=[Release(A), Release(B)])).counts.free == 3
    assert ledger.apply(Batch(2, releases=[Release(C)])).counts.free == 4
