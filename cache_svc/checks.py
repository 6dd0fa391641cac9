"""What a batch or a declaration must be before the ledger looks at it: a malformed one is refused whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache_svc.blocks import GRANTED, ID_MASK, SEALED, WRITING
from jitney.block_ops import Batch, Block, DeclaredBlock, RequestId, Tier
from jitney.errors import InvalidRequest
from jitney.keys import KEY_BYTES, Key

MAX_GENERATION = 1 << 31
"""Of a declared block; later ones have room above it, a handle has 32 bits for it."""


def check(batch: Batch, total: int, block_tokens: int) -> None:
    """Raises InvalidRequest if a block lies outside the pool, a length is wrong, a request is 0, a chain names a key
    twice, or a request has two Acquires or two Reserves."""
    for seal in batch.seals:
        _request(seal.request, "seals.request")
        _blocks(seal.blocks, total, "seals.blocks")
        _keys(seal.keys, "seals.keys")
        _keys((seal.parent,), "seals.parent")
        _equal(len(seal.keys), len(seal.blocks), "seals.keys")
        _equal(len(seal.token_ids), 4 * block_tokens * len(seal.blocks), "seals.token_ids")
    for withdraw in batch.withdraws:
        _request(withdraw.request, "withdraws.request")
    for release in batch.releases:
        _request(release.request, "releases.request")
        _blocks(release.blocks, total, "releases.blocks")
    for swap in batch.swaps:
        _request(swap.request, "swaps.request")
        if swap.tier not in (Tier.CPU, Tier.SSD):
            what = f"swaps.tier is {swap.tier.name}, must be CPU or SSD"
            raise InvalidRequest(what, field="swaps.tier", limit="CPU or SSD", value=swap.tier.name)
    for bind in batch.binds:
        _request(bind.request, "binds.request")
        _blocks(bind.blocks, total, "binds.blocks")
    for back in batch.returns:
        _blocks(back.blocks, total, "returns.blocks")
    for share in batch.shares:
        _blocks((share.block,), total, "shares.block")
        for request in share.requests:
            _request(request, "shares.requests")
    for fork in batch.forks:
        _request(fork.request, "forks.request")
        _blocks((fork.block,), total, "forks.block")
    checked: dict[RequestId, Sequence[Key]] = {}
    for acquire in batch.acquires:
        _request(acquire.request, "acquires.request")
        _chain(acquire.keys, "acquires.keys")
        checked[acquire.request] = acquire.keys
    for reserve in batch.reserves:
        _request(reserve.request, "reserves.request")
        if checked.get(reserve.request) is not reserve.keys:
            _chain(reserve.keys, "reserves.keys")
    _once([op.request for op in batch.acquires], "acquires.request")
    _once([op.request for op in batch.reserves], "reserves.request")


def check_declared(declared: Sequence[DeclaredBlock], total: int, block_tokens: int) -> None:
    """Raises InvalidRequest if a block is declared twice, outside the pool, or without what its state needs."""
    _blocks([block.block for block in declared], total, "blocks.block")
    _once([block.block & ID_MASK for block in declared], "blocks.block")
    for block in declared:
        if not 1 <= (generation := block.block >> 32) <= MAX_GENERATION:
            raise InvalidRequest(
                f"a block is declared in generation {generation}, must be 1 to {MAX_GENERATION}",
                field="blocks.block",
                limit=MAX_GENERATION,
                value=generation,
            )
    for block in declared:
        for request in (*block.holders, *block.joiners):
            _request(request, "blocks.holders")
        if block.state is SEALED:
            _keys((block.key, block.parent), "blocks.key")
            _equal(len(block.token_ids), 4 * block_tokens, "blocks.token_ids")
        elif block.state is WRITING:
            if block.key:
                _keys((block.key,), "blocks.key")
            if not block.holders:
                raise InvalidRequest("a WRITING block needs a holder", field="blocks.holders", limit=1, value=0)
        elif block.state is not GRANTED:
            allowed = f"{GRANTED.name}, {WRITING.name} or {SEALED.name}"
            raise InvalidRequest(
                f"a declared block is {allowed}, not {block.state.name}",
                field="blocks.state",
                limit=allowed,
                value=block.state.name,
            )


def _request(request: RequestId, field: str) -> None:
    if request <= 0:
        raise InvalidRequest(f"{field}: a request is a number from 1 on, not {request}", field=field, value=request)


def _blocks(blocks: Sequence[Block], total: int, field: str) -> None:
    for block in blocks:
        if block & ID_MASK >= total:
            raise InvalidRequest(
                f"{field}: block {block & ID_MASK} is outside of the pool of {total}",
                field=field,
                limit=total - 1,
                value=block & ID_MASK,
            )


def _keys(keys: Sequence[Key] | Sequence[bytes], field: str) -> None:
    if not set(map(len, keys)) <= {KEY_BYTES}:
        wrong = next(len(key) for key in keys if len(key) != KEY_BYTES)
        raise InvalidRequest(f"{field}: a key has {KEY_BYTES} bytes, not {wrong}", field=field, limit=32, value=wrong)


def _chain(keys: Sequence[Key], field: str) -> None:
    _keys(keys, field)
    if len(set(keys)) != len(keys):
        raise InvalidRequest(f"{field}: a chain names a key twice", field=field, limit=len(set(keys)), value=len(keys))


def _equal(found: int, wanted: int, field: str) -> None:
    if found != wanted:
        raise InvalidRequest(f"{field}: length {found}, must be {wanted}", field=field, limit=wanted, value=found)


def _once(numbers: Iterable[int], field: str) -> None:
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            raise InvalidRequest(f"{field}: {number} is named twice", field=field, limit=1, value=number)
        seen.add(number)
