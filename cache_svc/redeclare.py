"""A ledger built again from what an executor declares after a restart of the cache.

Blocks that are not declared are free, in a generation above all declared ones. Of two blocks declared under one key
the first is the sealed one, the other stays private; a pending key that is sealed already is pending no more, and its
joiners hold the block and are told so with the first answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_svc.blocks import GRANTED, ID_MASK, SEALED, WRITING, BlockTable
from cache_svc.checks import check_declared
from cache_svc.eviction import EvictionOrder, OrderOf
from cache_svc.holding import Holding
from cache_svc.index import Content, Index, Origin
from cache_svc.ledger import Ledger
from cache_svc.tiers import Owner, Tiers
from jitney.block_ops import DeclaredBlock, RequestId
from jitney.keys import Key


def restored(
    total: int,
    block_tokens: int,
    declared: Sequence[DeclaredBlock],
    tiers: Tiers | None = None,
    owner: Owner = ("", 0),
    fingerprint: bytes = b"",
    index: Index | None = None,
    order: OrderOf = EvictionOrder,
) -> Ledger:
    """The ledger that the declaration describes; `index` is an empty one for its blocks.

    Raises InvalidRequest for one that cannot be true.
    """
    check_declared(declared, total, block_tokens)
    newest = max((block.block >> 32 for block in declared), default=0)
    table = BlockTable(total, newest + 1, index, order)
    ledger = Ledger(table, block_tokens, tiers, owner, fingerprint)
    named = {block.block & ID_MASK for block in declared}
    table.free = [block for block in table.free if block not in named]
    for block in declared:
        table.handle[block.block & ID_MASK] = block.block
        if block.state is GRANTED:
            table.state[block.block & ID_MASK] = GRANTED
            table.granted += 1
    for block in declared:
        if block.state is SEALED:
            _sealed(ledger, block)
    for block in declared:
        if block.state is WRITING:
            _writing(ledger, block)
    for block in declared:
        _joiners(ledger, block)
    return ledger


def _sealed(ledger: Ledger, declared: DeclaredBlock) -> None:
    block = declared.block & ID_MASK
    if declared.key in ledger.blocks.index.sealed:
        if declared.holders:
            _writing(ledger, declared)
        else:
            ledger.blocks.state[block], ledger.blocks.holders[block] = WRITING, 1
            ledger.blocks.drop((block,))
        return
    origin = Origin(declared.tenant, declared.salt_digest, declared.model_version)
    ledger.blocks.holders[block] = 1
    ledger.blocks.seal(block, Key(declared.key), Key(declared.parent), Content(declared.token_ids, origin))
    _hold(ledger, block, declared.holders)
    ledger.blocks.drop((block,))


def _writing(ledger: Ledger, declared: DeclaredBlock) -> None:
    block, key = declared.block & ID_MASK, Key(declared.key)
    ledger.blocks.state[block] = WRITING
    _hold(ledger, block, declared.holders)
    owner = declared.holders[0]
    own = ledger.requests[owner].own
    if key and key not in own and ledger.blocks.holders[block] == 1:
        own[key] = block
        ledger.blocks.name[block] = key
        if key not in ledger.blocks.index.sealed:
            ledger.pending.owner.setdefault(key, owner)


def _joiners(ledger: Ledger, declared: DeclaredBlock) -> None:
    key = Key(declared.key)
    block = ledger.blocks.index.sealed.get(key)
    for joiner in declared.joiners:
        holding = ledger.requests.setdefault(joiner, Holding())
        if block is not None:
            if block not in holding.blocks:
                _hold(ledger, block, (joiner,))
                ledger.joins.sealed(joiner, ledger.blocks.handle[block])
        elif key in ledger.pending.owner and ledger.pending.owner[key] != joiner:
            ledger.pending.join((key,), joiner)
            holding.joins[key] = None
        if holding.empty:
            del ledger.requests[joiner]


def _hold(ledger: Ledger, block: int, holders: Sequence[RequestId]) -> None:
    for request in dict.fromkeys(holders):
        ledger.requests.setdefault(request, Holding()).blocks[block] = None
        ledger.blocks.hold((block,))
