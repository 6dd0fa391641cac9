"""A serialised snapshot or decision, taken apart into its columns and put together again, byte for byte.

Parts are keyed by `field number << 8 | number inside the field's message` (0: the field itself). A part is either the
content of a column, or opaque: one or more whole fields with their tags. Only canonical messages come apart (fields in
rising order, shortest lengths, no column twice), which is what protobuf and `jitney.scheduler_codec` write; of any
other `split` says None, so that what it takes apart is always restored exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import Message

from jitney.columns import Table, columns_of
from jitney.scheduler.v1 import scheduler_pb2 as pb
from jitney.scheduler_codec import DECISION_TABLES, SNAPSHOT_TABLES

Parts = dict[int, bytes]

_MEMORY_CONTENT = pb.PolicyMemory.DESCRIPTOR.fields_by_name["content"].number
_ID_COLUMNS = ("next_candidates", "coast_victims", "padding_rows")
_TWO_KEYS = ("HistogramTable",)  # rows are named by their first two columns


@dataclass(frozen=True, slots=True)
class Group:
    """Columns of one table: their parts, the entries of each, and how many of the first ones name a row."""

    keys: tuple[int, ...]
    dtypes: tuple[np.dtype[np.unsignedinteger], ...]
    widths: tuple[int, ...]
    naming: int


@dataclass(frozen=True, slots=True)
class Schema:
    """What of a message is columns. `tables`: field number -> the numbers of its columns."""

    tables: Mapping[int, frozenset[int]]
    bare: frozenset[int]  # fields that are one column by themselves
    groups: tuple[Group, ...]
    memory: int  # field number of the policy memory

    def is_column(self, key: int) -> bool:
        """Whether a part is the content of a column."""
        number, inner = key >> 8, key & 0xFF
        return number in self.bare if not inner else inner in self.tables.get(number, ())


def split(data: bytes, schema: Schema) -> Parts | None:
    """The parts of a message; None if it is not canonical."""
    parts: Parts = {}
    at, last, end = 0, 0, len(data)
    while at < end:
        start = at
        field = _field(data, at, end)
        if field is None:
            return None
        number, body, at = field
        key = number << 8
        if not last <= number < 256 or not number:
            return None
        columns = schema.tables.get(number)
        if columns is not None or number in schema.bare:
            if number == last or body < 0:
                return None
            if columns is None:
                parts[key] = data[body:at]
            elif not _split_table(data, body, at, key, columns, parts):
                return None
        elif number == last:
            parts[key] += data[start:at]
        else:
            parts[key] = data[start:at]
        last = number
    return parts


def _split_table(data: bytes, at: int, end: int, key: int, columns: frozenset[int], parts: Parts) -> bool:
    parts[key] = b""  # it is there, if empty
    last = 0
    while at < end:
        start = at
        field = _field(data, at, end)
        if field is None:
            return False
        number, body, at = field
        if not last < number < 256:
            return False
        last = number
        if number not in columns:
            parts[key | number] = data[start:at]
        elif body < 0:
            return False
        else:
            parts[key | number] = data[body:at]
    return True


def _field(data: bytes, at: int, end: int) -> tuple[int, int, int] | None:
    """Number, start of the content (-1: none of that length) and end of the field that begins at `at`."""
    tag = data[at]
    at += 1
    if tag > 0x7F:
        if at >= end or not 0 < data[at] < 0x80:
            return None  # numbers above 2,047 are in no message of ours
        tag = tag & 0x7F | data[at] << 7
        at += 1
    kind = tag & 7
    if kind == 2:
        size = shift = 0
        while True:
            if at >= end:
                return None
            byte = data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if not byte and shift:
            return None
        return (tag >> 3, at, at + size) if at + size <= end else None
    if kind == 0:
        while at < end and data[at] > 0x7F:
            at += 1
        at += 1
    elif kind == 1:
        at += 8
    elif kind == 5:
        at += 4
    else:
        return None
    return (tag >> 3, -1, at) if at <= end else None


def join(parts: Parts, schema: Schema) -> bytes:
    """The message of these parts."""
    out: list[bytes] = []
    table: list[bytes] = []
    open_key = 0
    for key in sorted(parts):
        if open_key and key >> 8 != open_key >> 8:
            _close(out, open_key, table)
            open_key, table = 0, []
        part = parts[key]
        inner = key & 0xFF
        number = key >> 8
        if number in schema.tables:
            open_key = number << 8
            if inner in schema.tables[number]:
                table += (_length_tag(inner), varint(len(part)), part)
            else:
                table.append(part)
        elif number in schema.bare:
            out += (_length_tag(number), varint(len(part)), part)
        else:
            out.append(part)
    if open_key:
        _close(out, open_key, table)
    return b"".join(out)


def _close(out: list[bytes], key: int, table: list[bytes]) -> None:
    out += (_length_tag(key >> 8), varint(sum(map(len, table))), *table)


def _length_tag(number: int) -> bytes:
    return varint(number << 3 | 2)


def varint(value: int) -> bytes:
    """A number of at least 0 as protobuf writes it."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(message: type[Message], field: str) -> int:
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return number


def _group(number: int, kind: type[Table]) -> Group:
    message: type[Message] = getattr(pb, kind.name)
    columns = columns_of(kind)
    return Group(
        keys=tuple(number << 8 | _number(message, column.name) for column in columns),
        dtypes=tuple(np.dtype(f"<u{column.dtype.itemsize}") for column in columns),
        widths=tuple(column.width for column in columns),
        naming=2 if kind.name in _TWO_KEYS else 1,
    )


def _schema(message: type[Message], tables: Mapping[str, tuple[str, type[Table]]], bare: tuple[str, ...]) -> Schema:
    groups = [_group(_number(message, target), kind) for target, kind in tables.values()]
    bare_numbers = tuple(_number(message, name) for name in bare)
    memory = _number(message, "memory")
    columns: dict[int, set[int]] = {memory: {_MEMORY_CONTENT}}
    for group in groups:
        for key in group.keys:
            columns.setdefault(key >> 8, set()).add(key & 0xFF)
    ids = [Group((number << 8,), (np.dtype("<u8"),), (1,), 1) for number in bare_numbers]
    return Schema(
        tables={number: frozenset(inner) for number, inner in columns.items()},
        bare=frozenset(bare_numbers),
        groups=(*groups, *ids),
        memory=memory,
    )


SNAPSHOT_SCHEMA = _schema(pb.Snapshot, SNAPSHOT_TABLES, ())
DECISION_SCHEMA = _schema(pb.Decision, {name: (name, kind) for name, kind in DECISION_TABLES.items()}, _ID_COLUMNS)
MEMORY_CONTENT = _MEMORY_CONTENT
DIGEST_KEY = _number(pb.Decision, "snapshot_digest") << 8
POLICY_KEY = _number(pb.Snapshot, "policy") << 8
