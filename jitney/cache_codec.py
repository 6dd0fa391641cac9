"""Block operations and their results, between plain values and the messages of `jitney.cache.v1`.

Bytes that cannot be what they stand for raise InvalidRequest with the field, the limit and the value.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitney.block_ops import (
    Acquire,
    AcquireResult,
    Batch,
    BatchAnswer,
    Bind,
    Block,
    Counts,
    Fork,
    ForkResult,
    JoinEvent,
    LowerTiers,
    Release,
    RequestId,
    Reserve,
    ReserveResult,
    Return,
    Room,
    Seal,
    Share,
    Swap,
    SwapResult,
    Withdraw,
)
from jitney.cache.v1 import cache_pb2 as pb
from jitney.errors import InvalidRequest
from jitney.keys import Key
from jitney.packed import code_of, codes_of, handles, pack, split_keys, tier_of, wire

_NO_TIERS = LowerTiers()


def encode_batch(batch: Batch, executor: str) -> pb.Batch:
    """The batch as a message. Epoch and boot id are set by who sends it. ValueError for numbers out of range."""
    message = pb.Batch(
        executor=executor,
        op_seq=batch.op_seq,
        step=batch.step,
        in_flight_step=batch.in_flight_step,
        withdraws=[pb.Withdraw(request=op.request) for op in batch.withdraws],
        releases=[
            pb.Release(request=op.request, blocks=pack(op.blocks), generated_tokens=op.generated_tokens)
            for op in batch.releases
        ],
        swaps=[pb.Swap(request=op.request, tier=wire(op.tier)) for op in batch.swaps],
        binds=[pb.Bind(request=op.request, blocks=pack(op.blocks)) for op in batch.binds],
        returns=[pb.Return(blocks=pack(op.blocks)) for op in batch.returns],
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
            blocks=pack(seal.blocks),
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
        Acquire(RequestId(op.request), split_keys(op.keys, "acquires.keys"), op.least_blocks) for op in message.acquires
    ]
    acquired = {op.request: op.keys for op in acquires}
    return Batch(
        op_seq=message.op_seq,
        step=message.step,
        in_flight_step=message.in_flight_step,
        seals=[
            Seal(
                RequestId(op.request),
                handles(op.blocks, "seals.blocks"),
                split_keys(op.keys, "seals.keys"),
                Key(op.parent),
                op.token_ids,
                op.tenant,
                op.salt_digest,
                op.model_version,
            )
            for op in message.seals
        ],
        withdraws=[Withdraw(RequestId(op.request)) for op in message.withdraws],
        releases=[
            Release(RequestId(op.request), handles(op.blocks, "releases.blocks"), op.generated_tokens)
            for op in message.releases
        ],
        swaps=[Swap(RequestId(op.request), tier_of(op.tier)) for op in message.swaps],
        binds=[Bind(RequestId(op.request), handles(op.blocks, "binds.blocks")) for op in message.binds],
        returns=[Return(handles(op.blocks, "returns.blocks")) for op in message.returns],
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
        return split_keys(op.keys, "reserves.keys")
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
                code=wire(result.code), pinned_blocks=result.pinned_blocks, leaving_blocks=result.leaving_blocks
            )
            for result in answer.swaps
        ],
        binds=[pb.BlockCodes(codes=bytes(codes)) for codes in answer.binds],
        returns=[pb.BlockCodes(codes=bytes(codes)) for codes in answer.returns],
        shares=bytes(answer.shares),
        forks=[pb.ForkResult(code=wire(result.code), block=result.block) for result in answer.forks],
        acquires=[
            pb.AcquireResult(
                code=wire(result.code), blocks=pack(result.blocks), joined=result.joined, owner=result.owner
            )
            for result in answer.acquires
        ],
        reserves=[
            pb.ReserveResult(
                code=wire(result.code),
                blocks=pack(result.blocks),
                short_by=result.short_by,
                ticket=result.ticket,
                cpu_blocks=result.cpu_blocks,
                ssd_blocks=result.ssd_blocks,
            )
            for result in answer.reserves
        ],
        lower=encode_lower(answer.lower),
        granted=pack(answer.granted),
        joins=[
            pb.JoinEvent(request=event.request, blocks=pack(event.blocks), withdrawn=event.withdrawn)
            for event in answer.joins
        ],
        apply_us=apply_us,
    )


def decode_answer(message: pb.BatchAnswer) -> BatchAnswer:
    """The answer of a message. InvalidRequest for packed bytes of a wrong length or an unknown code."""
    return BatchAnswer(
        op_seq=message.op_seq,
        counts=decode_counts(message.counts),
        seals=[codes_of(block.codes, "seals") for block in message.seals],
        withdraws=codes_of(message.withdraws, "withdraws"),
        releases=[codes_of(block.codes, "releases") for block in message.releases],
        swaps=[
            SwapResult(code_of(result.code, "swaps"), result.pinned_blocks, result.leaving_blocks)
            for result in message.swaps
        ],
        binds=[codes_of(block.codes, "binds") for block in message.binds],
        returns=[codes_of(block.codes, "returns") for block in message.returns],
        shares=codes_of(message.shares, "shares"),
        forks=[ForkResult(code_of(result.code, "forks"), Block(result.block)) for result in message.forks],
        acquires=[
            AcquireResult(
                code_of(result.code, "acquires"),
                handles(result.blocks, "acquires.blocks"),
                result.joined,
                RequestId(result.owner),
            )
            for result in message.acquires
        ],
        reserves=[
            ReserveResult(
                code_of(result.code, "reserves"),
                handles(result.blocks, "reserves.blocks"),
                result.short_by,
                result.ticket,
                result.cpu_blocks,
                result.ssd_blocks,
            )
            for result in message.reserves
        ],
        lower=decode_lower(message.lower),
        granted=handles(message.granted, "granted"),
        joins=[
            JoinEvent(RequestId(event.request), handles(event.blocks, "joins.blocks"), event.withdrawn)
            for event in message.joins
        ],
        apply_us=message.apply_us,
    )


def encode_lower(lower: LowerTiers) -> pb.LowerTiers | None:
    """Room and rates as a message; None where there is nothing below the device."""
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


def decode_lower(message: pb.LowerTiers) -> LowerTiers:
    """Room and rates of a message."""
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
