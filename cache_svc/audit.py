"""Checks a ledger against itself: every block in exactly one state, holders counted right, index and order agree.

Read only; cost grows with the number of blocks and of what requests hold. Finds, never repairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

from cache_svc.blocks import CACHED, FREE, GRANTED, SEALED, WRITING
from cache_svc.index import NO_BLOCK
from cache_svc.ledger import Ledger
from jitney.block_ops import BlockState
from jitney.keys import block_key

MAX_FINDINGS = 100


def audit(ledger: Ledger, *, contents: bool = True) -> list[str]:
    """What is wrong, in sentences; empty when all is well. `contents`: also that keys are digests of the token ids."""
    parts = [_states(ledger), _holders(ledger), _index(ledger), _eviction(ledger), _pending(ledger)]
    if contents:
        parts.append(_contents(ledger))
    return list(islice(chain.from_iterable(parts), MAX_FINDINGS))


def _states(ledger: Ledger) -> Iterator[str]:
    blocks = ledger.blocks
    by_state: dict[BlockState, set[int]] = {}
    for block, state in enumerate(blocks.state):
        by_state.setdefault(state, set()).add(block)
    if unknown := set(by_state) - {FREE, GRANTED, WRITING, SEALED, CACHED}:
        yield f"blocks in unknown states {sorted(unknown)}"
    if len(blocks.free) != len(set(blocks.free)):
        yield "a block is in the free list twice"
    if set(blocks.free) != by_state.get(FREE, set()):
        yield f"free list and FREE blocks differ: {sorted(set(blocks.free) ^ by_state.get(FREE, set()))[:8]}"
    if blocks.granted != len(by_state.get(GRANTED, ())):
        yield f"{blocks.granted} granted blocks are counted, {len(by_state.get(GRANTED, ()))} are GRANTED"
    if set(blocks.index.sealed.values()) != by_state.get(SEALED, set()) | by_state.get(CACHED, set()):
        yield "blocks in the index are not just the SEALED and CACHED ones"
    for block, handle in enumerate(blocks.handle):
        if handle & 0xFFFFFFFF != block or handle >> 32 < 1:
            yield f"block {block} has the handle {handle:#x}"
    for block, name in enumerate(blocks.name):
        if name is not None and blocks.state[block] is not WRITING:
            yield f"block {block} is {blocks.state[block].name} and still named for a key"


def _holders(ledger: Ledger) -> Iterator[str]:
    blocks = ledger.blocks
    counted: Counter[int] = Counter()
    for request, holding in ledger.requests.items():
        counted.update(holding.blocks.keys())
        if holding.empty:
            yield f"request {request} has nothing and is still known"
        if holding.private and holding.own:
            yield f"request {request} holds invalidated content, and others may join it"
    pins = Counter[int]() if ledger.below is None else ledger.below.device_pins()
    counted.update(pins)
    for block, pinned in enumerate(blocks.pins):
        if pinned != pins[block] or (block in blocks.pinned) != (pinned > 0):
            yield f"block {block} counts {pinned} pins, {pins[block]} copies need it"
    for block, holders in enumerate(blocks.holders):
        if holders != counted[block]:
            yield f"block {block} counts {holders} holders, {counted[block]} requests and copies hold it"
        if (holders > 0) != (blocks.state[block] in (WRITING, SEALED)):
            yield f"block {block} is {blocks.state[block].name} with {holders} holders"


def _index(ledger: Ledger) -> Iterator[str]:
    index = ledger.blocks.index
    for key, block in index.sealed.items():
        if index.key[block] != key:
            yield f"block {block} is found under a key that is not its own"
        parent_key = index.parent_key[block]
        if parent_key is None or index.token_ids[block] is None or index.origin[block] is None:
            yield f"sealed block {block} lacks a parent key or content"
            continue
        parent = index.sealed.get(parent_key, NO_BLOCK)
        if index.parent[block] != parent:
            yield f"block {block} stands behind block {index.parent[block]}, its parent key is in {parent}"
        if (block in index.orphans.get(parent_key, {})) != (parent == NO_BLOCK):
            yield f"block {block} with parent {parent} is wrongly listed as an orphan or not"
    if orphans := {b for family in index.orphans.values() for b in family} - set(index.sealed.values()):
        yield f"orphans that are not sealed: {sorted(orphans)[:8]}"
    for block, named in enumerate(index.key):
        if named is not None and index.sealed.get(named) != block:
            yield f"block {block} has a key under which it is not found"


def _eviction(ledger: Ledger) -> Iterator[str]:
    blocks, index, eviction = ledger.blocks, ledger.blocks.index, ledger.blocks.eviction
    children: dict[int, list[int]] = {}
    for block in index.sealed.values():
        children.setdefault(index.parent[block], []).append(block)
    seen: set[int] = set()
    for block in eviction.order:
        if blocks.state[block] is not CACHED:
            yield f"block {block} is {blocks.state[block].name} and in the eviction order"
        if any(child not in seen for child in children.get(block, ())):
            yield f"block {block} would be evicted before a child"
        seen.add(block)
    for block in index.sealed.values():
        unready = sum(child not in eviction.order for child in children.get(block, ()))
        if eviction.unready[block] != unready:
            yield f"block {block} counts {eviction.unready[block]} children that stay, there are {unready}"
        if blocks.state[block] is CACHED and not unready and block not in eviction.order:
            yield f"block {block} could be evicted and is not in the order"


def _pending(ledger: Ledger) -> Iterator[str]:
    pending, sealed = ledger.pending, ledger.blocks.index.sealed
    for key, owner in pending.owner.items():
        if key in sealed:
            yield f"a key of request {owner} is pending and sealed"
        holding = ledger.requests.get(owner)
        if holding is None or key not in holding.own:
            yield f"request {owner} owns a pending key that it does not know"
    for request, holding in ledger.requests.items():
        for key, block in holding.own.items():
            if ledger.blocks.name[block] != key or block not in holding.blocks:
                yield f"request {request} has block {block} for a key, the block says otherwise"
    joins = {(request, key) for request, holding in ledger.requests.items() for key in holding.joins}
    if joins != {(request, key) for key, waiting in pending.joiners.items() for request in waiting}:
        yield "joins of requests and joiners of keys differ"
    if any(key not in pending.owner for key in pending.joiners):
        yield "a request waits for a key that nobody computes"


def _contents(ledger: Ledger) -> Iterator[str]:
    index = ledger.blocks.index
    for key, block in index.sealed.items():
        token_ids, parent_key = index.token_ids[block], index.parent_key[block]
        if token_ids is None or parent_key is None:
            continue
        if block_key(parent_key, token_ids) != key:
            yield f"the key of block {block} is not the digest of its parent key and token ids"
