"""A malformed batch or declaration is refused whole, with field, limit and value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jitney.block_ops import (
    Acquire,
    Bind,
    Block,
    BlockState,
    DeclaredBlock,
    Fork,
    Release,
    RequestId,
    Reserve,
    Return,
    Share,
    Withdraw,
)
from jitney.errors import InvalidRequest
from jitney.keys import Key
from tests.support.ledger_rig import BLOCK_TOKENS, Rig, prompt

A, NOBODY, OUTSIDE = RequestId(1), RequestId(0), Block((1 << 32) | 4)
KEYS = prompt(1, 2).keys
SEAL = prompt(1, 2).seal(1, [Block(1 << 32), Block((1 << 32) | 1)])


@pytest.mark.parametrize(
    ("field", "operations"),
    [
        ("seals.request", {"seals": [replace(SEAL, request=NOBODY)]}),
        ("seals.blocks", {"seals": [replace(SEAL, blocks=[OUTSIDE, OUTSIDE])]}),
        ("seals.keys", {"seals": [replace(SEAL, keys=SEAL.keys[:1])]}),
        ("seals.keys", {"seals": [replace(SEAL, keys=[Key(b"short"), SEAL.keys[1]])]}),
        ("seals.parent", {"seals": [replace(SEAL, parent=Key(b""))]}),
        ("seals.token_ids", {"seals": [replace(SEAL, token_ids=SEAL.token_ids[4:])]}),
        ("withdraws.request", {"withdraws": [Withdraw(NOBODY)]}),
        ("releases.request", {"releases": [Release(NOBODY)]}),
        ("releases.blocks", {"releases": [Release(A, [OUTSIDE])]}),
        ("binds.request", {"binds": [Bind(NOBODY, [])]}),
        ("binds.blocks", {"binds": [Bind(A, [OUTSIDE])]}),
        ("returns.blocks", {"returns": [Return([OUTSIDE])]}),
        ("shares.block", {"shares": [Share(OUTSIDE, [A])]}),
        ("shares.requests", {"shares": [Share(Block(1 << 32), [NOBODY])]}),
        ("forks.request", {"forks": [Fork(NOBODY, Block(1 << 32))]}),
        ("forks.block", {"forks": [Fork(A, OUTSIDE)]}),
        ("acquires.request", {"acquires": [Acquire(NOBODY, KEYS)]}),
        ("acquires.request", {"acquires": [Acquire(A, KEYS), Acquire(A, KEYS)]}),
        ("acquires.keys", {"acquires": [Acquire(A, [Key(KEYS[0] + b"x")])]}),
        ("acquires.keys", {"acquires": [Acquire(A, [KEYS[0], KEYS[0]])]}),
        ("reserves.request", {"reserves": [Reserve(NOBODY, KEYS, 2)]}),
        ("reserves.request", {"reserves": [Reserve(A, KEYS, 2), Reserve(A, KEYS, 2)]}),
        ("reserves.keys", {"reserves": [Reserve(A, [Key(b"")], 1)]}),
    ],
)
def test_a_malformed_batch_changes_nothing(field: str, operations: dict[str, Any]) -> None:
    rig = Rig(4)
    rig.board(2, prompt(1))
    before = rig.ledger.blocks.counts()
    with pytest.raises(InvalidRequest) as caught:
        rig.apply(**{"releases": [Release(RequestId(2))], **operations, "grant": 1})
    assert caught.value.field == field
    assert rig.ledger.blocks.counts() == before
    rig.check()


DECLARED = DeclaredBlock(
    Block(1 << 32), BlockState.SEALED, KEYS[0], prompt(1).root, bytes(4 * BLOCK_TOKENS), holders=[A]
)


@pytest.mark.parametrize(
    ("field", "declared"),
    [
        ("blocks.block", [DECLARED, DECLARED]),
        ("blocks.block", [DECLARED, replace(DECLARED, block=Block(2 << 32))]),
        ("blocks.block", [replace(DECLARED, block=OUTSIDE)]),
        ("blocks.state", [replace(DECLARED, state=BlockState.CACHED)]),
        ("blocks.state", [replace(DECLARED, state=BlockState.UNSPECIFIED)]),
        ("blocks.key", [replace(DECLARED, key=b"")]),
        ("blocks.key", [replace(DECLARED, parent=b"")]),
        ("blocks.key", [replace(DECLARED, state=BlockState.WRITING, key=b"x")]),
        ("blocks.token_ids", [replace(DECLARED, token_ids=b"")]),
        ("blocks.holders", [replace(DECLARED, state=BlockState.WRITING, holders=[])]),
        ("blocks.holders", [replace(DECLARED, holders=[NOBODY])]),
        ("blocks.block", [DeclaredBlock(Block(1), BlockState.GRANTED)]),
        ("blocks.block", [DeclaredBlock(Block((1 << 64) - 3), BlockState.GRANTED)]),
    ],
)
def test_a_declaration_that_cannot_be_true(field: str, declared: list[DeclaredBlock]) -> None:
    from cache_svc.redeclare import restored

    with pytest.raises(InvalidRequest) as caught:
        restored(4, BLOCK_TOKENS, declared)
    assert caught.value.field == field
