"""Block operations and their results, between plain values and the messages of `jitney.cache.v1`.

Packed fields: handles are uint64 little-endian, keys 32 bytes each, codes one byte each.
Bytes that cannot be what they stand for raise InvalidRequest with the field, the limit and the value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from jitney.block_ops import (
    Acquire,
    AcquireResult,
    Batch,
    BatchAnswer,
    Bind,
    Block,
    BlockState,
    Chain,
    ChainHits,
    Counts,
    DeclaredBlock,
    Fork,
    ForkResult,
    JoinEvent,
    LowerTiers,
    Release,
    RequestId,
    Reserve,
    ReserveResult,
    ResultCode,
    Return,
    Room,
    Seal,
    Share,
    Swap,
    SwapResult,
    Tier,
    Withdraw,
)
from jitney.cache.v1 import cache_pb2 as pb
from jitney.errors import InvalidRequest
from jitney.keys import KEY_BYTES, Key

HANDLE_BYTES = 8
_KEY = np.dtype(f"V{KEY_BYTES}")
_CODES = tuple(ResultCode)
_NO_TIERS = LowerTiers()


def encode_batch(batch: Batch, executor: str) -> pb.Batch:
    """The batch as a message. Epoch and boot id are set by who sends it. ValueError for numbers out of range."""
    message = pb.Batch(
        executor=executor,
        op_seq=batch.op_seq,
        step=batch.step,
        in_flight_step=batch.in_flight_step,
        withdraws=[pb.Withdraw(request=op.request) for op in batch.withdraws],
        releases=[pb.Release(request=op.request, blocks=_from_handles(op.blocks)) for op in batch.releases],
        swaps=[pb.Swap(request=op.request, tier=_wire(op.tier)) for op in batch.swaps],
        binds=[pb.Bind(request=op.request, blocks=_from_handles(op.blocks)) for op in batch.binds],
        returns=[pb.Return(blocks=_from_handles(op.blocks)) for op in batch.returns],
        shares=[pb.Share(block=op.block, requests=op.requests) for op in batch.shares],
        forks=[pb.Fork(request=op.request, block=op.block) for op in batch.forks],
        grant=batch.grant,
    )
    _add_chains(message, batch)
    return message


def _add_chains(message: pb.Batch, batch: Batch) -> None:
    """Operations that carry keys: made in place, as a list that is handed over is copied, keys and all."""
    seals, acquires, reserves = message.seals, message.acquires, message.reserves
    for seal in batch.seals:
        seals.add(
            request=seal.request,
            blocks=_from_handles(seal.blocks),
            keys=b"".join(seal.keys),
            parent=seal.parent,
            token_ids=seal.token_ids,
            tenant=seal.tenant,
            salt_digest=seal.salt_digest,
            model_version=seal.model_version,
        )
    acquired: dict[RequestId, Sequence[Key]] = {}
    for acquire in batch.acquires:
        acquired[acquire.request] = acquire.keys
        acquires.add(request=acquire.request, keys=b"".join(acquire.keys), least_blocks=acquire.least_blocks)
    for reserve in batch.reserves:
        known = acquired.get(reserve.request) is reserve.keys
        reserves.add(
            request=reserve.request,
            keys=b"" if known else b"".join(reserve.keys),
            keys_of_acquire=known,
            blocks_total=reserve.blocks_total,
            load_blocks=reserve.load_blocks,
        )


def decode_batch(message: pb.Batch) -> Batch:
    """The batch of a message. InvalidRequest for packed bytes of a wrong length, or keys that are nowhere."""
    acquires = [
        Acquire(RequestId(op.request), _keys(op.keys, "acquires.keys"), op.least_blocks) for op in message.acquires
    ]
    acquired = {op.request: op.keys for op in acquires}
    return Batch(
        op_seq=message.op_seq,
        step=message.step,
        in_flight_step=message.in_flight_step,
        seals=[
            Seal(
                RequestId(op.request),
                _handles(op.blocks, "seals.blocks"),
                _keys(op.keys, "seals.keys"),
                Key(op.parent),
                op.token_ids,
                op.tenant,
                op.salt_digest,
                op.model_version,
            )
            for op in message.seals
        ],
        withdraws=[Withdraw(RequestId(op.request)) for op in message.withdraws],
        releases=[Release(RequestId(op.request), _handles(op.blocks, "releases.blocks")) for op in message.releases],
        swaps=[Swap(RequestId(op.request), _tier(op.tier)) for op in message.swaps],
        binds=[Bind(RequestId(op.request), _handles(op.blocks, "binds.blocks")) for op in message.binds],
        returns=[Return(_handles(op.blocks, "returns.blocks")) for op in message.returns],
        shares=[Share(Block(op.block), [RequestId(r) for r in op.requests]) for op in message.shares],
        forks=[Fork(RequestId(op.request), Block(op.block)) for op in message.forks],
        acquires=acquires,
        reserves=[
            Reserve(RequestId(op.request), _reserved(op, acquired), op.blocks_total, op.load_blocks)
            for op in message.reserves
        ],
        grant=message.grant,
    )


def _reserved(op: pb.Reserve, acquired: dict[RequestId, Sequence[Key]]) -> Sequence[Key]:
    if not op.keys_of_acquire:
        return _keys(op.keys, "reserves.keys")
    keys = acquired.get(RequestId(op.request))
    if keys is None:
        what = f"request {op.request} reserves the keys of an Acquire that the batch does not have"
        raise InvalidRequest(what, field="reserves.keys_of_acquire", value=op.request)
    return keys


def encode_answer(answer: BatchAnswer, *, epoch: int, boot_id: bytes, apply_us: int) -> pb.BatchAnswer:
    """The answer as a message; `apply_us` goes instead of the answer's own."""
    return pb.BatchAnswer(
        epoch=epoch,
        boot_id=boot_id,
        op_seq=answer.op_seq,
        counts=encode_counts(answer.counts),
        seals=[pb.BlockCodes(codes=bytes(codes)) for codes in answer.seals],
        withdraws=bytes(answer.withdraws),
        releases=[pb.BlockCodes(codes=bytes(codes)) for codes in answer.releases],
        swaps=[
            pb.SwapResult(
                code=_wire(result.code), pinned_blocks=result.pinned_blocks, leaving_blocks=result.leaving_blocks
            )
            for result in answer.swaps
        ],
        binds=[pb.BlockCodes(codes=bytes(codes)) for codes in answer.binds],
        returns=[pb.BlockCodes(codes=bytes(codes)) for codes in answer.returns],
        shares=bytes(answer.shares),
        forks=[pb.ForkResult(code=_wire(result.code), block=result.block) for result in answer.forks],
        acquires=[
            pb.AcquireResult(
                code=_wire(result.code), blocks=_from_handles(result.blocks), joined=result.joined, owner=result.owner
            )
            for result in answer.acquires
        ],
        reserves=[
            pb.ReserveResult(
                code=_wire(result.code),
                blocks=_from_handles(result.blocks),
                short_by=result.short_by,
                ticket=result.ticket,
                cpu_blocks=result.cpu_blocks,
                ssd_blocks=result.ssd_blocks,
            )
            for result in answer.reserves
        ],
        lower=_encode_lower(answer.lower),
        granted=_from_handles(answer.granted),
        joins=[
            pb.JoinEvent(request=event.request, blocks=_from_handles(event.blocks), withdrawn=event.withdrawn)
            for event in answer.joins
        ],
        apply_us=apply_us,
    )


def decode_answer(message: pb.BatchAnswer) -> BatchAnswer:
    """The answer of a message. InvalidRequest for packed bytes of a wrong length or an unknown code."""
    return BatchAnswer(
        op_seq=message.op_seq,
        counts=decode_counts(message.counts),
        seals=[_codes(block.codes, "seals") for block in message.seals],
        withdraws=_codes(message.withdraws, "withdraws"),
        releases=[_codes(block.codes, "releases") for block in message.releases],
        swaps=[
            SwapResult(_code(result.code, "swaps"), result.pinned_blocks, result.leaving_blocks)
            for result in message.swaps
        ],
        binds=[_codes(block.codes, "binds") for block in message.binds],
        returns=[_codes(block.codes, "returns") for block in message.returns],
        shares=_codes(message.shares, "shares"),
        forks=[ForkResult(_code(result.code, "forks"), Block(result.block)) for result in message.forks],
        acquires=[
            AcquireResult(
                _code(result.code, "acquires"),
                _handles(result.blocks, "acquires.blocks"),
                result.joined,
                RequestId(result.owner),
            )
            for result in message.acquires
        ],
        reserves=[
            ReserveResult(
                _code(result.code, "reserves"),
                _handles(result.blocks, "reserves.blocks"),
                result.short_by,
                result.ticket,
                result.cpu_blocks,
                result.ssd_blocks,
            )
            for result in message.reserves
        ],
        lower=_decode_lower(message.lower),
        granted=_handles(message.granted, "granted"),
        joins=[
            JoinEvent(RequestId(event.request), _handles(event.blocks, "joins.blocks"), event.withdrawn)
            for event in message.joins
        ],
        apply_us=message.apply_us,
    )


def _encode_lower(lower: LowerTiers) -> pb.LowerTiers | None:
    if lower == _NO_TIERS:
        return None
    return pb.LowerTiers(
        cpu=_encode_room(lower.cpu),
        ssd=_encode_room(lower.ssd),
        ssd_write_bytes_per_s=lower.ssd_write_bytes_per_s,
        ssd_read_bytes_per_s=lower.ssd_read_bytes_per_s,
    )


def _encode_room(room: Room) -> pb.TierRoom:
    return pb.TierRoom(free_blocks=room.free_blocks, pin_blocks=room.pin_blocks, queue_blocks=room.queue_blocks)


def _decode_lower(message: pb.LowerTiers) -> LowerTiers:
    return LowerTiers(
        _decode_room(message.cpu),
        _decode_room(message.ssd),
        message.ssd_write_bytes_per_s,
        message.ssd_read_bytes_per_s,
    )


def _decode_room(message: pb.TierRoom) -> Room:
    return Room(message.free_blocks, message.pin_blocks, message.queue_blocks)


def encode_counts(counts: Counts) -> pb.Counts:
    """Counts as a message."""
    return pb.Counts(
        free=counts.free,
        evictable=counts.evictable,
        leaving=counts.leaving,
        granted=counts.granted,
        total=counts.total,
    )


def decode_counts(message: pb.Counts) -> Counts:
    """Counts of a message."""
    return Counts(message.free, message.evictable, message.leaving, message.granted, message.total)


def encode_chains(executor: str, chains: Sequence[Chain]) -> pb.LookupRequest:
    """The look-up as a message."""
    return pb.LookupRequest(
        executor=executor,
        chains=[pb.Chain(request=chain.request, keys=b"".join(chain.keys)) for chain in chains],
    )


def decode_chains(message: pb.LookupRequest) -> list[Chain]:
    """The chains of a look-up. InvalidRequest for keys of a wrong length."""
    return [Chain(RequestId(chain.request), _keys(chain.keys, "chains.keys")) for chain in message.chains]


def encode_hits(hits: Sequence[ChainHits]) -> pb.LookupResponse:
    """Hits as a message."""
    return pb.LookupResponse(
        hits=[
            pb.ChainHits(
                device_blocks=hit.device_blocks,
                unheld_blocks=hit.unheld_blocks,
                cpu_blocks=hit.cpu_blocks,
                ssd_blocks=hit.ssd_blocks,
                pending_blocks=hit.pending_blocks,
                pending_owner=hit.pending_owner,
            )
            for hit in hits
        ]
    )


def decode_hits(message: pb.LookupResponse) -> list[ChainHits]:
    """Hits of a message."""
    return [
        ChainHits(
            hit.device_blocks,
            hit.unheld_blocks,
            hit.cpu_blocks,
            hit.ssd_blocks,
            hit.pending_blocks,
            RequestId(hit.pending_owner),
        )
        for hit in message.hits
    ]


def encode_declared(blocks: Sequence[DeclaredBlock]) -> list[pb.DeclaredBlock]:
    """Declared blocks as messages."""
    return [
        pb.DeclaredBlock(
            block=block.block,
            state=_wire(block.state),
            key=block.key,
            parent=block.parent,
            token_ids=block.token_ids,
            tenant=block.tenant,
            salt_digest=block.salt_digest,
            model_version=block.model_version,
            holders=block.holders,
            joiners=block.joiners,
        )
        for block in blocks
    ]


def decode_declared(messages: Sequence[pb.DeclaredBlock]) -> list[DeclaredBlock]:
    """Declared blocks of messages. InvalidRequest for an unknown state."""
    return [
        DeclaredBlock(
            block=Block(message.block),
            state=_state(message.state),
            key=message.key,
            parent=message.parent,
            token_ids=message.token_ids,
            tenant=message.tenant,
            salt_digest=message.salt_digest,
            model_version=message.model_version,
            holders=[RequestId(request) for request in message.holders],
            joiners=[RequestId(request) for request in message.joiners],
        )
        for message in messages
    ]


def _from_handles(blocks: Sequence[Block]) -> bytes:
    if len(blocks) == 1 and blocks[0] >> 64 == 0:  # most lists have one
        return blocks[0].to_bytes(8, "little")
    try:
        return struct.pack(f"<{len(blocks)}Q", *blocks)
    except struct.error as error:
        raise ValueError(f"a handle is out of range: {error}") from error


def _handles(data: bytes, field: str) -> list[Block]:
    if not data:
        return []
    if len(data) == HANDLE_BYTES:
        return [Block(int.from_bytes(data, "little"))]
    _multiple(data, HANDLE_BYTES, field)
    return list(struct.unpack(f"<{len(data) // HANDLE_BYTES}Q", data))


def _keys(data: bytes, field: str) -> list[Key]:
    if not data:
        return []
    _multiple(data, KEY_BYTES, field)
    keys: list[Key] = np.frombuffer(data, _KEY).tolist()
    return keys


def _multiple(data: bytes, size: int, field: str) -> None:
    if len(data) % size:
        raise InvalidRequest(
            f"{field} has {len(data)} bytes, no multiple of {size}", field=field, limit=size, value=len(data)
        )


def _codes(data: bytes, field: str) -> list[ResultCode]:
    try:
        return [_CODES[code] for code in data]
    except IndexError as error:
        raise InvalidRequest(
            f"{field}: result code {max(data)} is unknown", field=field, limit=int(max(_CODES)), value=max(data)
        ) from error


def _wire(number: IntEnum) -> Any:
    """The number of an enum value; the stubs ask for a type that exists at type checking only."""
    return int(number)


def _code(number: int, field: str) -> ResultCode:
    return _codes(bytes((min(number, 255),)), field)[0]


def _tier(number: int) -> Tier:
    try:
        return Tier(number)
    except ValueError as error:
        raise InvalidRequest(
            f"swaps.tier {number} is unknown", field="swaps.tier", limit=int(max(Tier)), value=number
        ) from error


def _state(number: int) -> BlockState:
    try:
        return BlockState(number)
    except ValueError as error:
        raise InvalidRequest(
            f"blocks.state {number} is unknown", field="blocks.state", limit=int(max(BlockState)), value=number
        ) from error
