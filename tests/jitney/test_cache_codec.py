"""Batches, answers, look-ups and declarations survive the wire."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from jitney.cache_codec import (
    decode_answer,
    decode_batch,
    encode_answer,
    encode_batch,
)
from jitney.chain_codec import (
    decode_chains,
    decode_declared,
    decode_hits,
    encode_chains,
    encode_declared,
    encode_hits,
)
from jitney.errors import InvalidRequest
from jitney.keys import KEY_BYTES, Key

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
REQUEST, BLOCK = U64.map(RequestId), U64.map(Block)
KEY = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES).map(Key)
CODE = st.sampled_from(ResultCode)
ROOM = st.builds(Room, U32, U32, U32)


def some(of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, max_size=3)


BATCH = st.builds(
    Batch,
    op_seq=U64,
    step=U64,
    in_flight_step=U64,
    seals=some(st.builds(Seal, REQUEST, some(BLOCK), some(KEY), KEY, st.binary(), st.text(), st.binary(), st.text())),
    withdraws=some(st.builds(Withdraw, REQUEST)),
    releases=some(st.builds(Release, REQUEST, some(BLOCK))),
    swaps=some(st.builds(Swap, REQUEST, st.sampled_from(Tier))),
    binds=some(st.builds(Bind, REQUEST, some(BLOCK))),
    returns=some(st.builds(Return, some(BLOCK))),
    shares=some(st.builds(Share, BLOCK, some(REQUEST))),
    forks=some(st.builds(Fork, REQUEST, BLOCK)),
    acquires=some(st.builds(Acquire, REQUEST, some(KEY), U32)),
    reserves=some(st.builds(Reserve, REQUEST, some(KEY), U32, U32)),
    grant=U32,
)
ANSWER = st.builds(
    BatchAnswer,
    op_seq=U64,
    counts=st.builds(Counts, U32, U32, U32, U32, U32),
    seals=some(some(CODE)),
    withdraws=some(CODE),
    releases=some(some(CODE)),
    binds=some(some(CODE)),
    returns=some(some(CODE)),
    shares=some(CODE),
    forks=some(st.builds(ForkResult, CODE, BLOCK)),
    acquires=some(st.builds(AcquireResult, CODE, some(BLOCK), U32, REQUEST)),
    reserves=some(st.builds(ReserveResult, CODE, some(BLOCK), U32, U64, U32, U32)),
    granted=some(BLOCK),
    joins=some(st.builds(JoinEvent, REQUEST, some(BLOCK), U32)),
    apply_us=st.integers(0, 2**62),
    swaps=some(st.builds(SwapResult, CODE, U32, U32)),
    lower=st.builds(LowerTiers, ROOM, ROOM, U64, U64),
)


@settings(max_examples=60, deadline=None)
@given(BATCH)
def test_batches(batch: Batch) -> None:
    assert decode_batch(pb.Batch.FromString(encode_batch(batch, "e").SerializeToString())) == batch


@settings(max_examples=60, deadline=None)
@given(ANSWER)
def test_answers(answer: BatchAnswer) -> None:
    message = encode_answer(answer, epoch=3, boot_id=b"b" * 16, apply_us=answer.apply_us)
    assert (message.epoch, message.boot_id) == (3, b"b" * 16)
    assert decode_answer(pb.BatchAnswer.FromString(message.SerializeToString())) == answer


@settings(max_examples=30, deadline=None)
@given(some(st.builds(Chain, REQUEST, some(KEY))), some(st.builds(ChainHits, U32, U32, U32, U32, U32, REQUEST)))
def test_lookups(chains: list[Chain], hits: list[ChainHits]) -> None:
    assert decode_chains(encode_chains("e", chains)) == chains
    assert decode_hits(encode_hits(hits)) == hits


@settings(max_examples=30, deadline=None)
@given(
    some(
        st.builds(
            DeclaredBlock,
            BLOCK,
            st.sampled_from(BlockState),
            KEY,
            KEY,
            st.binary(),
            st.text(),
            st.binary(),
            st.text(),
            some(REQUEST),
            some(REQUEST),
        )
    )
)
def test_declarations(declared: list[DeclaredBlock]) -> None:
    assert decode_declared(encode_declared(declared)) == declared


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("seals.blocks", pb.Batch(seals=[pb.Seal(blocks=b"1234567")])),
        ("seals.keys", pb.Batch(seals=[pb.Seal(keys=b"x" * 33)])),
        ("releases.blocks", pb.Batch(releases=[pb.Release(blocks=b"1")])),
        ("binds.blocks", pb.Batch(binds=[pb.Bind(blocks=b"1")])),
        ("returns.blocks", pb.Batch(returns=[pb.Return(blocks=b"1")])),
        ("acquires.keys", pb.Batch(acquires=[pb.Acquire(keys=b"x" * 31)])),
        ("reserves.keys", pb.Batch(reserves=[pb.Reserve(keys=b"x")])),
    ],
)
def test_packed_bytes_of_a_wrong_length(field: str, message: pb.Batch) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_batch(message)
    assert caught.value.field == field
    assert caught.value.limit and caught.value.value


def test_unknown_numbers() -> None:
    with pytest.raises(InvalidRequest):
        decode_answer(pb.BatchAnswer(shares=b"\xff"))
    with pytest.raises(InvalidRequest):
        decode_declared([pb.DeclaredBlock(state=77)])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        decode_answer(pb.BatchAnswer(forks=[pb.ForkResult(code=99)]))  # type: ignore[arg-type]


def test_a_chain_that_is_acquired_and_reserved_is_sent_once() -> None:
    keys = [Key(bytes((number,)) * KEY_BYTES) for number in range(3)]
    one = RequestId(1)
    message = encode_batch(Batch(1, acquires=[Acquire(one, keys)], reserves=[Reserve(one, keys, 4)]), "e")
    assert message.reserves[0].keys == b""
    batch = decode_batch(message)
    assert batch.reserves[0].keys is batch.acquires[0].keys
    assert batch.reserves[0] == Reserve(one, keys, 4)


def test_a_reserve_of_an_acquire_that_is_not_there() -> None:
    message = pb.Batch(acquires=[pb.Acquire(request=1)], reserves=[pb.Reserve(request=2, keys_of_acquire=True)])
    with pytest.raises(InvalidRequest) as caught:
        decode_batch(message)
    assert (caught.value.field, caught.value.value) == ("reserves.keys_of_acquire", "2")


def test_numbers_out_of_range_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="range"):
        encode_batch(Batch(0, returns=[Return([Block(2**64), Block(1)])]), "e")
    with pytest.raises(ValueError, match="range"):
        encode_batch(Batch(0, grant=2**32), "e")
