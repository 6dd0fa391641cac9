"""The log gives back exactly what was written, whatever became of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.decision_log import (
    FULL_EVERY,
    MAGIC,
    RECORD,
    Frame,
    FrameDecoder,
    FrameEncoder,
    Kind,
    tables_of,
    tables_record,
)
from jitney.errors import InvalidRequest, Missing
from jitney.log_segments import LogReader, LogWriter, segments
from jitney.scheduler.v1 import scheduler_pb2 as pb
from tests.support.recorded import recorded

CAP = 64 << 20
Pairs = list[tuple[bytes, bytes]]


def written(folder: Path, pairs: Pairs, cap: int = CAP) -> None:
    writer = LogWriter(folder, cap)
    for number, (snapshot, decision) in enumerate(pairs):
        writer.append(snapshot, decision, number)
    writer.close()


def read(path: Path) -> tuple[Pairs, LogReader]:
    reader = LogReader(path)
    pairs = [(frame.snapshot, frame.decision) for frame in reader]
    reader.close()
    return pairs, reader


def frames_of(path: Path) -> list[Frame]:
    with LogReader(path) as reader:
        return list(reader)


def records(data: bytes) -> list[tuple[int, int]]:
    """Start and end of each record of a segment."""
    found, at = [], len(MAGIC)
    while at < len(data):
        size = RECORD.unpack_from(data, at)[0] + RECORD.size
        found.append((at, at + size))
        at += size
    return found


def test_every_byte_comes_back(tmp_path: Path) -> None:
    pairs = list(recorded())
    written(tmp_path, pairs)
    with LogReader(tmp_path) as reader:
        frames = list(reader)
    assert [(f.snapshot, f.decision) for f in frames] == pairs
    assert [f.round_trip_us for f in frames] == list(range(len(pairs)))
    assert (reader.damaged, reader.torn, reader.gaps) == (0, 0, 0)
    assert read(segments(tmp_path)[0])[0] == pairs
    size = sum(path.stat().st_size for path in segments(tmp_path))
    assert size < sum(len(a) + len(b) for a, b in pairs) / 10


def test_bytes_that_are_no_messages_come_back_too(tmp_path: Path) -> None:
    odd = pb.Snapshot(step=4).SerializeToString() + pb.Snapshot(contract_version=1).SerializeToString()
    pairs = [*recorded()[:3], (b"", b""), (b"\xff" * 9, b"noise"), (odd, b""), *recorded()[3:6], *recorded()[90:95]]
    written(tmp_path, pairs)
    assert read(tmp_path)[0] == pairs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=200), st.binary(max_size=100)), max_size=20))
def test_any_bytes_come_back(pairs: Pairs) -> None:
    encoder, decoder = FrameEncoder(), FrameDecoder()
    for snapshot, decision in pairs:
        record = encoder.encode(snapshot, decision, 5)
        _, kind, check = RECORD.unpack_from(record)
        frame = decoder.decode(Kind(kind), check, record[RECORD.size :])
        assert (frame.snapshot, frame.decision) == (snapshot, decision)


def test_a_torn_tail_is_the_end(tmp_path: Path) -> None:
    pairs = list(recorded()[:20])
    written(tmp_path, pairs)
    path = segments(tmp_path)[0]
    data = path.read_bytes()
    starts = [start for start, _ in records(data)]
    for cut in range(starts[-2] - 1, len(data)):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for _, end in records(data))
        assert read(tmp_path)[0] == pairs[:whole]


def test_damage_is_skipped_to_the_next_full_frame(tmp_path: Path) -> None:
    pairs = list(recorded()[:300])
    written(tmp_path, pairs)
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    start, _ = records(bytes(data))[7]
    data[start + RECORD.size + 2] ^= 0x10
    path.write_bytes(data)
    found, reader = read(tmp_path)
    assert found == [*pairs[:7], *pairs[FULL_EVERY:]]
    assert (reader.damaged, reader.gaps) == (1, 1)


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 2**20), byte=st.integers(1, 255))
def test_no_damage_gives_a_wrong_frame(tmp_path_factory: pytest.TempPathFactory, place: int, byte: int) -> None:
    folder = tmp_path_factory.mktemp("log")
    pairs = list(recorded()[:12])
    written(folder, pairs)
    path = segments(folder)[0]
    data = bytearray(path.read_bytes())
    data[len(MAGIC) + place % (len(data) - len(MAGIC))] ^= byte
    path.write_bytes(data)
    assert all(pair in pairs for pair in read(folder)[0])


def test_the_ring_keeps_its_cap_and_the_newest(tmp_path: Path) -> None:
    pairs = list(recorded())
    cap = 24_000
    writer = LogWriter(tmp_path, cap)
    for snapshot, decision in pairs:
        writer.append(snapshot, decision, 0)
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= cap
    writer.close()
    found, reader = read(tmp_path)
    assert 0 < len(found) < len(pairs) and found == pairs[-len(found) :]
    assert writer.bytes_written > cap and reader.damaged == 0
    written(tmp_path, pairs[:10], cap)  # another life of the executor goes on behind it
    assert read(tmp_path)[0][-10:] == pairs[:10]


def test_a_log_is_followed_while_it_is_written(tmp_path: Path) -> None:
    pairs = list(recorded()[:120])
    writer = LogWriter(tmp_path, 160_000)
    reader = LogReader(tmp_path)
    found: Pairs = []
    for number, (snapshot, decision) in enumerate(pairs):
        writer.append(snapshot, decision, 0)
        if number % 7 == 0:
            found += [(f.snapshot, f.decision) for f in reader]
            assert len(found) == number + 1
    found += [(f.snapshot, f.decision) for f in reader]
    assert found == pairs and len(segments(tmp_path)) > 1
    writer.close()
    reader.close()
    with LogReader(tmp_path, at_end=True) as newest:
        assert pairs[-1] in [(f.snapshot, f.decision) for f in newest]
        assert newest.frames < len(pairs)


def test_a_gap_is_marked(tmp_path: Path) -> None:
    pairs = list(recorded()[:6])
    writer = LogWriter(tmp_path, CAP)
    for number, (snapshot, decision) in enumerate(pairs):
        writer.append(snapshot, decision, 0, gap=number == 4)
    writer.close()
    assert [frame.gap for frame in frames_of(tmp_path)] == [False] * 4 + [True, False]


def test_tables_that_snapshots_only_name_are_in_every_segment(tmp_path: Path) -> None:
    digest, content = b"d" * 16, b"tables " * 300
    table = pb.PolicyTable(name="lengths", digest=digest)
    named = pb.Snapshot(step=1, policy=pb.PolicyChoice(name="sjf", tables=[table])).SerializeToString()
    table.content = content
    told = pb.Snapshot(step=1, policy=pb.PolicyChoice(name="sjf", tables=[table])).SerializeToString()
    writer = LogWriter(tmp_path, 160)
    for snapshot in (told, named, named, named):
        writer.append(snapshot, b"", 0)
    writer.close()
    found, newest = read(segments(tmp_path)[-1])
    assert [snapshot for snapshot, _ in found] == [named]
    assert newest.tables == {digest: content}
    record = tables_record({digest: content})
    assert tables_of(RECORD.unpack_from(record)[2], record[RECORD.size :]) == {digest: content}
    with pytest.raises(InvalidRequest):
        tables_of(7, record[RECORD.size :])


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Missing):
        LogReader(tmp_path / "nothing")
    other = tmp_path / "other.jlog"
    other.write_bytes(b"hello, hello")
    with pytest.raises(InvalidRequest):
        LogReader(other)
    assert frames_of(tmp_path) == []
