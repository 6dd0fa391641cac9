"""Messages come apart and are put together again byte for byte, or do not come apart."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.scheduler.v1 import scheduler_pb2 as pb
from jitney.wire_parts import DECISION_SCHEMA, SNAPSHOT_SCHEMA, join, split, varint
from tests.support.recorded import recorded


def test_recorded_messages_come_apart_and_together() -> None:
    for snapshot, decision in recorded():
        parts, told = split(snapshot, SNAPSHOT_SCHEMA), split(decision, DECISION_SCHEMA)
        assert parts is not None and told is not None
        assert join(parts, SNAPSHOT_SCHEMA) == snapshot
        assert join(told, DECISION_SCHEMA) == decision


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 3))
def test_whatever_comes_apart_is_restored(noise: bytes, place: int) -> None:
    snapshot, decision = recorded()[place * 50]
    cut = len(snapshot) * place // 4
    for data, schema in (
        (noise, SNAPSHOT_SCHEMA),
        (noise, DECISION_SCHEMA),
        (snapshot[:cut] + noise + snapshot[cut:], SNAPSHOT_SCHEMA),
        (decision + noise, DECISION_SCHEMA),
    ):
        parts = split(data, schema)
        assert parts is None or join(parts, schema) == data


def test_a_message_that_is_not_canonical_does_not_come_apart() -> None:
    whole = pb.Snapshot(step=3, running=pb.RunningTable(id=bytes(8), tenant=bytes(4))).SerializeToString()
    assert split(whole, SNAPSHOT_SCHEMA) is not None
    head, table = whole[:2], whole[2:]
    assert split(table + head, SNAPSHOT_SCHEMA) is None  # out of order
    assert split(whole + table, SNAPSHOT_SCHEMA) is None  # a table twice
    assert split(whole[:-1], SNAPSHOT_SCHEMA) is None  # cut off
    long_length = table[:1] + bytes((table[1] | 0x80, 0)) + table[2:]
    assert split(head + long_length, SNAPSHOT_SCHEMA) is None


def test_numbers_are_written_as_protobuf_does() -> None:
    for value in (1, 127, 128, 16383, 16384, 2**32, 2**63):
        assert b"\x20" + varint(value) == pb.Snapshot(step=value).SerializeToString()
