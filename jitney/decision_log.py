"""The decision log: every snapshot that was decided on, with its decision, exactly as they went over the wire.

A log is a folder of segments, `000000000001.jlog` and up, or one such file. A segment is MAGIC and then records

    payload bytes u32, kind u8, check u32, payload

FULL holds both messages whole; DELTA holds what changed since the frame before, column by column (`frame_delta`).
The payloads of a FULL and of the DELTAs behind it are one deflate stream, flushed after each. TABLES holds learned
tables by digest: snapshots name them and need not hold them. `check` is the xxh3 of what a reader must have got in
the end, so that whatever happened to a frame on its way is found. A segment begins with a FULL; so does what follows
a gap. A reader takes a torn end for the end, and skips from a damaged frame to the next FULL.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import xxhash

from jitney.errors import InvalidRequest
from jitney.frame_delta import delta, patched
from jitney.scheduler.v1 import scheduler_pb2 as pb
from jitney.scheduler_codec import digest_of
from jitney.wire_parts import DECISION_SCHEMA, DIGEST_KEY, POLICY_KEY, SNAPSHOT_SCHEMA, Parts, join, split

MAGIC: Final = b"JTNYLOG\x01"
SUFFIX: Final = ".jlog"
FULL_EVERY: Final = 256
MAX_FRAME_BYTES: Final = 256 << 20
LEVEL: Final = 6  # a quarter smaller than level 1 for a tenth more CPU, which is spent outside of the interpreter lock
RECORD: Final = struct.Struct("<IBI")
_HEAD = struct.Struct("<IBI")  # round trip in us; flags; bytes of the snapshot or of its changes
_SYNC = b"\0\0\xff\xff"  # ends each flush, and is not written
_WHOLE_DIGEST = 1  # flag: the decision names the snapshot's digest, which is left out
_TABLE = struct.Struct("<BI")


class Kind(IntEnum):
    """Of a record."""

    FULL = 1
    FULL_AFTER_GAP = 2  # frames before it were dropped
    DELTA = 3
    TABLES = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """One decision. `gap`: frames are missing before this one."""

    snapshot: bytes
    decision: bytes
    round_trip_us: int = 0
    gap: bool = False


@dataclass(slots=True)
class _State:
    """The frame before, in parts; empty where it could not be taken apart."""

    snapshot: Parts
    decision: Parts


class FrameEncoder:
    """Frames to records, in order. `full` begins anew: at a segment's start and after a gap."""

    def __init__(self) -> None:
        self._state = _State({}, {})
        self._deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -15)
        self._since_full = 0
        self._begins = True
        self._gap = False
        self._policy = b""
        self.tables: dict[bytes, bytes] = {}  # content by digest, of all policies so far

    def begin(self, *, gap: bool = False) -> None:
        """The next frame is a full one."""
        self._begins = True
        self._gap |= gap

    def encode(self, snapshot: bytes, decision: bytes, round_trip_us: int) -> bytes:
        """The record of a frame."""
        parts, told = split(snapshot, SNAPSHOT_SCHEMA), split(decision, DECISION_SCHEMA)
        canonical = parts is not None and told is not None
        if parts is not None and parts.get(POLICY_KEY, b"") != self._policy:
            self._policy = parts.get(POLICY_KEY, b"")
            policy = pb.Snapshot.FromString(self._policy).policy
            self.tables |= {table.digest: table.content for table in policy.tables if table.content}
        digest = digest_of(snapshot)
        check = _check(digest, decision, round_trip_us)
        flags = 0
        if self._begins or not canonical or self._since_full >= FULL_EVERY - 1:
            kind = Kind.FULL_AFTER_GAP if self._gap else Kind.FULL
            self._deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -15)
            self._since_full, self._begins, self._gap = 0, False, False
            first, second = snapshot, decision
            self._state = _State(parts or {}, told or {}) if canonical else _State({}, {})
        else:
            assert parts is not None and told is not None
            kind = Kind.DELTA
            self._since_full += 1
            was = self._state
            self._state = _State(parts, dict(told))
            if told.get(DIGEST_KEY) == _digest_field(digest):
                flags |= _WHOLE_DIGEST
                del told[DIGEST_KEY]
            first = b"".join(delta(_foreseen_snapshot(was), parts, SNAPSHOT_SCHEMA))
            second = b"".join(delta(_foreseen_decision(was, parts), told, DECISION_SCHEMA))
        body = b"".join((_HEAD.pack(_clipped(round_trip_us), flags, len(first)), first, second))
        payload = self._deflate.compress(body) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        payload = payload.removesuffix(_SYNC)
        return RECORD.pack(len(payload), kind, check) + payload


class FrameDecoder:
    """Records to frames. After an InvalidRequest only a FULL goes on."""

    def __init__(self) -> None:
        self._state: _State | None = None
        self._inflate = zlib.decompressobj(-15)

    @property
    def lost(self) -> bool:
        """Whether a DELTA cannot be read."""
        return self._state is None

    def decode(self, kind: Kind, check: int, payload: bytes) -> Frame:
        """The frame of a FULL or DELTA record. InvalidRequest if it is damaged."""
        state, self._state = self._state, None
        if kind is not Kind.DELTA:
            self._inflate = zlib.decompressobj(-15)
        elif state is None:
            raise InvalidRequest("a frame has none before it", field="frame")
        try:
            body = self._inflate.decompress(payload + _SYNC, MAX_FRAME_BYTES)
            round_trip_us, flags, size = _HEAD.unpack_from(body)
        except (zlib.error, struct.error) as error:
            raise InvalidRequest(f"a frame is damaged: {error}", field="frame") from error
        first, second = body[_HEAD.size : _HEAD.size + size], body[_HEAD.size + size :]
        if kind is Kind.DELTA:
            assert state is not None
            parts = patched(_foreseen_snapshot(state), first, SNAPSHOT_SCHEMA)
            told = patched(_foreseen_decision(state, parts), second, DECISION_SCHEMA)
            snapshot = join(parts, SNAPSHOT_SCHEMA)
            if flags & _WHOLE_DIGEST:
                told[DIGEST_KEY] = _digest_field(digest_of(snapshot))
            decision = join(told, DECISION_SCHEMA)
            now = _State(parts, told)
        else:
            snapshot, decision = first, second
            split_parts, split_told = split(snapshot, SNAPSHOT_SCHEMA), split(decision, DECISION_SCHEMA)
            whole = split_parts is not None and split_told is not None
            now = _State(split_parts or {}, split_told or {}) if whole else _State({}, {})
        if _check(digest_of(snapshot), decision, round_trip_us) != check:
            raise InvalidRequest("a frame is damaged: its check differs", field="frame")
        self._state = now
        return Frame(snapshot, decision, round_trip_us, kind is Kind.FULL_AFTER_GAP)


def tables_record(tables: Mapping[bytes, bytes]) -> bytes:
    """The TABLES record of learned tables, content by digest."""
    body = b"".join(_TABLE.pack(len(d), len(c)) + d + c for d, c in sorted(tables.items()))
    payload = zlib.compress(body)
    return RECORD.pack(len(payload), Kind.TABLES, xxhash.xxh32_intdigest(body)) + payload


def tables_of(check: int, payload: bytes) -> dict[bytes, bytes]:
    """The tables of a TABLES record. InvalidRequest if it is damaged."""
    found: dict[bytes, bytes] = {}
    try:
        body = zlib.decompressobj().decompress(payload, MAX_FRAME_BYTES)
        if xxhash.xxh32_intdigest(body) != check:
            raise InvalidRequest("a record of tables is damaged: its check differs", field="tables")
        at = 0
        while at < len(body):
            digest_bytes, content_bytes = _TABLE.unpack_from(body, at)
            at += _TABLE.size + digest_bytes
            found[body[at - digest_bytes : at]] = body[at : at + content_bytes]
            at += content_bytes
    except (zlib.error, struct.error) as error:
        raise InvalidRequest(f"a record of tables is damaged: {error}", field="tables") from error
    return found


def _foreseen_snapshot(was: _State) -> Parts:
    """The frame before, with the policy memory that its decision returned."""
    return _with_memory(was.snapshot, SNAPSHOT_SCHEMA.memory, was.decision, DECISION_SCHEMA.memory)


def _foreseen_decision(was: _State, snapshot: Parts) -> Parts:
    """The decision before, with the policy memory of the new snapshot, and without a digest."""
    found = _with_memory(was.decision, DECISION_SCHEMA.memory, snapshot, SNAPSHOT_SCHEMA.memory)
    found.pop(DIGEST_KEY, None)
    return found


def _with_memory(parts: Parts, number: int, other: Parts, other_number: int) -> Parts:
    memory = {number << 8 | key & 0xFF: part for key, part in other.items() if key >> 8 == other_number}
    if not memory:
        return dict(parts)
    return {key: part for key, part in parts.items() if key >> 8 != number} | memory


def _digest_field(digest: bytes) -> bytes:
    return pb.Decision(snapshot_digest=digest).SerializeToString()


def _check(digest: bytes, decision: bytes, round_trip_us: int) -> int:
    return xxhash.xxh3_64_intdigest(decision, seed=_clipped(round_trip_us) ^ int.from_bytes(digest[:8], "little")) >> 32


def _clipped(us: int) -> int:
    return min(max(us, 0), 0xFFFFFFFF)
