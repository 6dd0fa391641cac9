"""Whatever changes between two messages, the changes turn the one into the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.columns import HISTOGRAM_BUCKETS
from jitney.errors import InvalidRequest
from jitney.frame_delta import delta, patched
from jitney.scheduler.v1 import scheduler_pb2 as pb
from jitney.wire_parts import SNAPSHOT_SCHEMA, Parts, split
from tests.support.recorded import recorded


def packed(dtype: str, values: list[int]) -> bytes:
    return np.array(values, dtype).tobytes()


def parts_of(message: pb.Snapshot) -> Parts:
    parts = split(message.SerializeToString(deterministic=True), SNAPSHOT_SCHEMA)
    assert parts is not None
    return parts


@st.composite
def messages(draw: st.DrawFn) -> pb.Snapshot:
    """Small snapshots with rows that come, go, move and repeat, columns that are not sent or too short, and memory."""
    message = pb.Snapshot(step=draw(st.integers(0, 300)), now_us=draw(st.integers(0, 2**40)))
    ids = draw(st.lists(st.integers(0, 9), max_size=8))
    if draw(st.booleans()):
        message.running.id = packed("<u8", ids)
        message.running.generated_tokens = packed("<i4", draw(_column(len(ids))))
        message.running.policy_a = packed("<i8", draw(_column(len(ids))))
        message.running.loading = packed("<u1", [i % 256 for i in draw(_column(len(ids)))])
    waiting = draw(st.lists(st.integers(0, 30), unique=True, max_size=8))
    message.waiting.id = packed("<u8", waiting)
    message.waiting.priority = packed("<i1", draw(_column(len(waiting))))
    message.waiting.policy_row = packed("<u4", draw(st.lists(st.integers(0, 5), max_size=3)))
    pairs = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), unique=True, max_size=4))
    message.histograms.tenant = packed("<u4", [tenant for tenant, _ in pairs])
    message.histograms.endpoint = packed("<u4", [endpoint for _, endpoint in pairs])
    message.histograms.counts = packed("<u4", draw(_column(len(pairs) * HISTOGRAM_BUCKETS, at_most=3)))
    message.ended.unlisted = draw(st.integers(0, 1))
    message.memory.content = draw(st.binary(max_size=40))
    return message


def _column(rows: int, at_most: int = 100) -> st.SearchStrategy[Any]:
    entry = st.one_of(st.just(1), st.integers(0, at_most))
    return st.one_of(st.just([1] * rows), st.lists(entry, min_size=rows, max_size=rows), st.just([]))


@settings(max_examples=200, deadline=None)
@given(messages(), messages())
def test_changes_turn_one_message_into_the_other(before: pb.Snapshot, after: pb.Snapshot) -> None:
    old, new = parts_of(before), parts_of(after)
    assert patched(old, b"".join(delta(old, new, SNAPSHOT_SCHEMA)), SNAPSHOT_SCHEMA) == new
    assert not delta(old, old, SNAPSHOT_SCHEMA)


def test_a_steady_step_takes_few_bytes() -> None:
    ids = packed("<u8", list(range(1000)))
    before = pb.Snapshot(running=pb.RunningTable(id=ids, generated_tokens=packed("<i4", list(range(1000)))))
    after = pb.Snapshot(running=pb.RunningTable(id=ids, generated_tokens=packed("<i4", list(range(1, 1001)))))
    assert sum(map(len, delta(parts_of(before), parts_of(after), SNAPSHOT_SCHEMA))) < 20


def test_an_arrival_and_a_departure_move_nothing_else() -> None:
    stays = list(range(500))
    before = pb.Snapshot(waiting=pb.WaitingTable(id=packed("<u8", stays), tokens=packed("<i4", [9 * i for i in stays])))
    stays = [*stays[:100], *stays[101:], 777]
    after = pb.Snapshot(waiting=pb.WaitingTable(id=packed("<u8", stays), tokens=packed("<i4", [9 * i for i in stays])))
    assert sum(map(len, delta(parts_of(before), parts_of(after), SNAPSHOT_SCHEMA))) < 120


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 200))
def test_damaged_changes_are_refused_or_harmless(noise: bytes, place: int) -> None:
    (first, _), (second, _) = recorded()[10:12]
    old, new = split(first, SNAPSHOT_SCHEMA), split(second, SNAPSHOT_SCHEMA)
    assert old is not None and new is not None
    changes = b"".join(delta(old, new, SNAPSHOT_SCHEMA))
    damaged = changes[:place] + noise + changes[place + len(noise) :]
    try:
        patched(old, damaged, SNAPSHOT_SCHEMA)
    except InvalidRequest as error:
        assert error.field == "frame"


def test_a_change_that_is_cut_off_is_refused() -> None:
    old, new = parts_of(pb.Snapshot(step=1)), parts_of(pb.Snapshot(step=2))
    with pytest.raises(InvalidRequest):
        patched(old, b"".join(delta(old, new, SNAPSHOT_SCHEMA))[:-1], SNAPSHOT_SCHEMA)
