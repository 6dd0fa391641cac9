"""Snapshots and decisions on the wire: equal to protobuf's own bytes, column by column as the proto says."""

from __future__ import annotations

import random
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings

from jitney import columns
from jitney.columns import REGISTRY, TABLES, HistogramTable, RunningTable, Table, WaitingPolicyTable, WaitingTable
from jitney.decision import Decision, PreemptionMode, Refusal, RefusalReason, WaitReason
from jitney.errors import InvalidRequest
from jitney.scheduler.v1 import scheduler_pb2 as pb
from jitney.scheduler_codec import (
    DECISION_TABLES,
    SNAPSHOT_TABLES,
    decode_decision,
    decode_snapshot,
    digest_of,
    encode_decision,
    encode_snapshot,
    with_attempt,
)
from jitney.snapshot import (
    Batching,
    HorizonKind,
    LowerTiers,
    Outcome,
    PolicyChoice,
    PolicyMemory,
    PolicyTable,
    Snapshot,
)
from tests.support.situations import random_snapshot, snapshots

PROTO = Path(__file__).parents[2] / "protos/jitney/scheduler/v1/scheduler.proto"
KINDS = {"uint8": "u1", "int8": "i1", "uint16": "u2", "uint32": "u4", "int32": "i4", "uint64": "u8", "int64": "i8"}


def test_the_registry_is_the_proto() -> None:
    """Same tables, same columns in the same order, same dtypes as the proto's comments say."""
    commented = dict(re.findall(r"^message (\w+) \{\n(.*?)^\}", PROTO.read_text(), re.MULTILINE | re.DOTALL))
    by_message: dict[str, list[columns.Column]] = {}
    for column in REGISTRY:
        by_message.setdefault(column.table, []).append(column)
    messages = {name for name in commented if name.endswith(("Table", "Columns", "ColumnUpdates"))} - {"PolicyTable"}
    assert set(by_message) == messages
    for name, body in commented.items():
        if name not in by_message:
            continue
        told = dict(re.findall(r"bytes (\w+) = \d+; // (\w+)", body))
        descriptor = pb.DESCRIPTOR.message_types_by_name[name]
        sent = {field.name for field in descriptor.fields if field.type == field.TYPE_BYTES}
        mine = {column.name: column.dtype for column in by_message[name]}
        assert set(mine) == set(told) == sent
        assert {field: np.dtype("<" + KINDS[kind]) for field, kind in told.items()} == mine
        numbers = [descriptor.fields_by_name[column].number for column in mine if column != "features"]
        assert numbers == sorted(numbers)
    assert {table for _, table in SNAPSHOT_TABLES.values()} | set(DECISION_TABLES.values()) == set(TABLES)


def test_enums_and_scalars_are_the_protos() -> None:
    enums = ((Batching, pb.Batching), (HorizonKind, pb.HorizonKind), (LowerTiers, pb.LowerTiers), (Outcome, pb.Outcome))
    more = ((PreemptionMode, pb.PreemptionMode), (WaitReason, pb.WaitReason), (RefusalReason, pb.RefusalReason))
    for mine, theirs in (*enums, *more):
        assert sorted(int(value) for value in mine) == sorted(theirs.values())
    for field in ("settings", "blocks", "cpu", "rates"):
        value = getattr(Snapshot(), field)
        descriptor = pb.Snapshot.DESCRIPTOR.fields_by_name[field].message_type
        assert descriptor is not None
        assert [f.name for f in fields(value)] == [f.name for f in descriptor.fields]


def full_table(kind: type[Table], rows: int, rand: random.Random) -> Any:
    made = {}
    for column in columns.columns_of(kind):
        info = np.iinfo(column.dtype)
        values = [rand.randint(int(info.min), int(info.max)) for _ in range(rows * column.width)]
        made[column.name] = np.array(values, column.dtype)
    return kind(**made)


def full_snapshot(rand: random.Random) -> Snapshot:
    tables = {field: full_table(kind, 3, rand) for field, (_, kind) in SNAPSHOT_TABLES.items()}
    policy = PolicyChoice("fcfs", (("a", -5), ("b", 7)), (PolicyTable("t", b"d" * 16, b"content"),))
    memory = PolicyMemory("fcfs", 2, b"\0\1")
    base = random_snapshot(rand, 0, 0, tiers=True)
    return replace(base, policy=policy, ended_unlisted=9, memory=memory, **tables)


def same(left: Any, right: Any) -> None:
    """Field by field, arrays by content and dtype."""
    for f in fields(left):
        a, b = getattr(left, f.name), getattr(right, f.name)
        if isinstance(a, Table):
            for (column, x), (_, y) in zip(a.columns(), b.columns(), strict=True):
                assert x.dtype == y.dtype and x.tolist() == y.tolist(), column
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.tolist() == b.tolist()
        elif f.name != "digest":
            assert a == b, f.name


def test_every_field_travels_and_protobuf_would_write_the_same_bytes() -> None:
    for seed in range(20):
        snapshot = full_snapshot(random.Random(seed))
        data = encode_snapshot(snapshot)
        back = decode_snapshot(data)
        same(snapshot, back)
        assert back.digest == digest_of(data) == xxhash.xxh3_128_digest(data)
        assert encode_snapshot(back) == data
        message = pb.Snapshot.FromString(data)
        assert message.SerializeToString(deterministic=True) == data


@settings(max_examples=50, deadline=None)
@given(snapshots(tiers=True))
def test_snapshots_round_trip(snapshot: Snapshot) -> None:
    same(snapshot, decode_snapshot(encode_snapshot(snapshot)))


def test_decisions_round_trip() -> None:
    rand = random.Random(2)
    ids = np.array([3, 2**64 - 1], np.uint64)
    decision = Decision(
        incarnation=2**63,
        step=4,
        attempt=5,
        snapshot_digest=b"0123456789abcdef",
        build="b",
        next_candidates=ids,
        coast_victims=ids[::-1].copy(),
        horizon_kind=HorizonKind.UNTIL_EVENT,
        horizon_steps=3,
        wake_at_us=2**40,
        waiting_reasons=((WaitReason.ROWS, 3), (WaitReason.BOUND, 1)),
        memory=PolicyMemory("p", 1, b"m"),
        refusals=(Refusal(9, RefusalReason.QUOTA, 1, -2, 3),),
        padding_rows=ids,
        chunk_cap_tokens=7,
        block_reserve=8,
        needed_blocks=9,
        skipped_load_blocks=3,
        **{field: full_table(kind, 2, rand) for field, kind in DECISION_TABLES.items()},
    )
    data = encode_decision(decision)
    same(decision, decode_decision(data))
    assert encode_decision(decode_decision(data)) == data
    same(Decision(), decode_decision(encode_decision(Decision())))


def test_another_attempt_is_the_same_snapshot() -> None:
    snapshot = full_snapshot(random.Random(3))
    again = decode_snapshot(with_attempt(encode_snapshot(snapshot), 41))
    assert again.attempt == 41
    same(replace(snapshot, attempt=41), again)


def test_columns_that_are_not_sent_stay_so() -> None:
    table = WaitingTable(id=np.array([1, 2], np.uint64), tokens=np.array([3, 4], np.int32))
    own = WaitingPolicyTable(np.array([1], np.uint32), np.array([5], np.int64), np.array([6], np.int64))
    back = decode_snapshot(encode_snapshot(Snapshot(waiting=table, waiting_policy=own)))
    assert back.waiting.rows == 2 and len(back.waiting.arrival_us) == 0
    assert back.waiting_policy.rows == 1 and back.waiting_policy.policy_b.tolist() == [6]


def test_a_column_of_another_dtype_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match=r"RunningTable\.id"):
        encode_snapshot(Snapshot(running=RunningTable(id=np.array([1], np.int64))))
    with pytest.raises(TypeError):
        encode_decision(Decision(next_candidates=np.array([1])))


def wrong(change: Any) -> InvalidRequest:
    message = pb.Snapshot.FromString(encode_snapshot(full_snapshot(random.Random(4))))
    change(message)
    with pytest.raises(InvalidRequest) as error:
        decode_snapshot(message.SerializeToString())
    return error.value


def test_what_cannot_be_a_snapshot() -> None:
    def longer(m: Any) -> None:
        m.running.held_blocks += b"\0\0\0\0"

    def odd(m: Any) -> None:
        m.waiting.tokens += b"\0"

    def version(m: Any) -> None:
        m.contract_version = 99

    def headless(m: Any) -> None:
        m.ending.ClearField("id")

    def batching(m: Any) -> None:
        m.settings.batching = 17

    def narrow(m: Any) -> None:
        m.histograms.counts = m.histograms.counts[:-4]

    def told(error: InvalidRequest) -> tuple[str, str, str]:
        return error.field, error.limit, error.value

    assert told(wrong(longer)) == ("running.held_blocks", "3", "4")
    assert told(wrong(odd)) == ("waiting.tokens", "4", "13")
    assert told(wrong(version)) == ("contract_version", "1", "99")
    assert told(wrong(headless)) == ("ending.held_blocks", "0", "3")
    assert told(wrong(batching)) == ("settings.batching", "3", "17")
    assert told(wrong(narrow)) == ("histograms.counts", "96", "95")
    for data in (b"\xff\xff", b"garbage that is not protobuf", encode_snapshot(Snapshot())[:-1]):
        with pytest.raises(InvalidRequest):
            decode_snapshot(data)


def test_random_bytes_and_flipped_bits_are_snapshots_or_invalid() -> None:
    rand = random.Random(6)
    good = encode_snapshot(full_snapshot(rand))
    for _ in range(400):
        data = bytearray(good)
        for _ in range(rand.randint(1, 4)):
            data[rand.randrange(len(data))] ^= 1 << rand.randrange(8)
        try:
            decode_snapshot(bytes(data))
        except InvalidRequest as error:
            assert error.field


def test_what_cannot_be_a_decision() -> None:
    with pytest.raises(InvalidRequest):
        decode_decision(b"\xff")
    message = pb.Decision()
    message.run.id = b"\0" * 8
    message.run.tokens = b"\0" * 8
    with pytest.raises(InvalidRequest) as error:
        decode_decision(message.SerializeToString())
    assert error.value.field == "run.tokens"


def test_histograms_are_as_wide_as_the_registry_says() -> None:
    table = HistogramTable(
        np.array([1, 2], np.uint32),
        np.array([3, 4], np.uint32),
        np.arange(2 * columns.HISTOGRAM_BUCKETS, dtype=np.uint32),
    )
    back = decode_snapshot(encode_snapshot(Snapshot(histograms=table))).histograms
    assert back.take(np.array([1])).counts.tolist() == list(range(32, 64))
