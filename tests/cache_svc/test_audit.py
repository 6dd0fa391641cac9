"""The audit finds what is wrong: each fault is planted in a sound ledger."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache_svc.audit import MAX_FINDINGS, audit
from cache_svc.blocks import CACHED, FREE, SEALED
from cache_svc.holding import Holding
from cache_svc.ledger import Ledger
from jitney.block_ops import Block, RequestId
from jitney.keys import Key
from tests.support.ledger_rig import Rig, prompt


def _rig() -> Rig:
    """Blocks 0 and 1 cached, 2 to 4 held by request 2 (sealed, sealed, pending), 5 granted, request 3 has joined."""
    rig = Rig(8)
    rig.cache(1, prompt(1, 2))
    rig.cache(2, prompt(5, 6))
    rig.release(1)
    rig.board(2, prompt(5, 6, 7))
    rig.apply(grant=1)
    rig.board(3, prompt(5, 6, 7))
    return rig


def _swap_order(ledger: Ledger) -> None:
    order = ledger.blocks.eviction.order
    order.move_to_end(next(iter(order)))


FAULTS: dict[str, Callable[[Ledger], object]] = {
    "a state without its list": lambda ledger: ledger.blocks.state.__setitem__(5, FREE),
    "free twice": lambda ledger: ledger.blocks.free.append(ledger.blocks.free[0]),
    "granted count": lambda ledger: setattr(ledger.blocks, "granted", 0),
    "one holder too many": lambda ledger: ledger.blocks.holders.__setitem__(2, 7),
    "cached with holders": lambda ledger: ledger.blocks.state.__setitem__(2, CACHED),
    "sealed without holders": lambda ledger: ledger.blocks.state.__setitem__(0, SEALED),
    "a request with nothing": lambda ledger: ledger.requests.__setitem__(RequestId(9), Holding()),
    "a wrong handle": lambda ledger: ledger.blocks.handle.__setitem__(1, Block(1 << 32)),
    "a key not found": lambda ledger: ledger.blocks.index.sealed.pop(prompt(1).keys[0]),
    "a wrong parent": lambda ledger: ledger.blocks.index.parent.__setitem__(3, 0),
    "no content": lambda ledger: ledger.blocks.index.token_ids.__setitem__(3, None),
    "an orphan lost": lambda ledger: ledger.blocks.index.orphans.clear(),
    "parents first": _swap_order,
    "not evictable any more": lambda ledger: ledger.blocks.eviction.order.popitem(),
    "unready count": lambda ledger: ledger.blocks.eviction.unready.__setitem__(0, 3),
    "a name too many": lambda ledger: ledger.blocks.name.__setitem__(0, Key(b"k" * 32)),
    "an owner gone": lambda ledger: ledger.pending.owner.__setitem__(prompt(5, 6, 7).keys[2], RequestId(8)),
    "pending and sealed": lambda ledger: ledger.pending.owner.__setitem__(prompt(1).keys[0], RequestId(2)),
    "a join forgotten": lambda ledger: ledger.pending.joiners.clear(),
    "nobody computes": lambda ledger: ledger.pending.owner.clear(),
    "other content": lambda ledger: ledger.blocks.index.token_ids.__setitem__(3, b"x" * 16),
}


def test_a_sound_ledger_has_no_findings() -> None:
    assert audit(_rig().ledger) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    ledger = _rig().ledger
    FAULTS[fault](ledger)
    assert audit(ledger) != []


def test_findings_are_bounded() -> None:
    ledger = Rig(500).ledger
    ledger.blocks.handle[:] = [Block(0)] * 500
    assert len(audit(ledger)) == MAX_FINDINGS
