"""What has changed from one message to the next, column by column.

Rows of a table are matched by what names them (the request's id, the tenant), so that an arrival or a departure moves
nothing else; of the rows that stay, a column is the same, or all its entries moved by one number but for a few
exceptions, or it is written as differences. All arithmetic is modulo the width of the entry, so nothing is lost.

A delta is a list of changes, each `key u16, mode u8, length u32, content`; a part without one is what it was. For
columns of a table "what it was" means: of the matched row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64
from jitney.errors import InvalidRequest
from jitney.wire_parts import MEMORY_CONTENT, Group, Parts, Schema

_CHANGE = struct.Struct("<HBI")
_PAIR = struct.Struct("<II")
Unsigned = NDArray[np.unsignedinteger]

MAX_ROWS = 1 << 20
"""Of a table that is matched row by row; a larger one is written whole."""


class Mode(IntEnum):
    """How a change is written."""

    DROP = 0  # the part is not there any more
    RAW = 1  # the part itself
    MATCH = 2  # before the columns of a table: rows, then where each run of rows begins and which row it was (-1: new)
    SPARSE = 3  # new rows; then what all others moved by, how many did not, which ones, and by what these moved
    DENSE = 4  # new rows; then by what each other one moved
    SPLICE = 5  # how much of the start and of the end is the same, then what is between


def delta(old: Parts, new: Parts, schema: Schema) -> list[bytes]:
    """The changes that turn `old` into `new`, ready to be joined."""
    out: list[bytes] = []
    for group in schema.groups:
        _group_changes(out, old, new, group)
    content = schema.memory << 8 | MEMORY_CONTENT
    before, after = old.get(content), new.get(content)
    if before is not None and after is not None and before != after:
        _memory_change(out, content, before, after)
    elif after is None and before is not None:
        _put(out, content, Mode.DROP)
    elif before is None and after is not None:
        _put(out, content, Mode.RAW, after)
    for key in new:
        if old.get(key) != new[key] and not schema.is_column(key):
            _put(out, key, Mode.RAW, new[key])
    for key in old:
        if key not in new and not schema.is_column(key):
            _put(out, key, Mode.DROP)
    return out


def patched(old: Parts, changes: bytes, schema: Schema) -> Parts:
    """The new parts. InvalidRequest if `changes` are not changes of `old`."""
    found: dict[int, list[tuple[Mode, bytes]]] = {}
    try:
        for key, mode, content in _read(changes):
            found.setdefault(key, []).append((mode, content))
        new: Parts = {key: part for key, part in old.items() if not schema.is_column(key)}
        for group in schema.groups:
            _patch_group(old, new, group, found)
        memory = schema.memory << 8 | MEMORY_CONTENT
        if memory in old:
            new[memory] = old[memory]
        for key, listed in found.items():
            for mode, content in listed:
                _patch(new, key, mode, content)
    except (ValueError, IndexError, struct.error) as error:
        raise InvalidRequest(f"a frame's changes do not fit the frame before: {error}", field="frame") from error
    return new


def _put(out: list[bytes], key: int, mode: Mode, *content: bytes) -> None:
    out += (_CHANGE.pack(key, mode, sum(map(len, content))), *content)


def _read(changes: bytes) -> Iterator[tuple[int, Mode, bytes]]:
    at = 0
    while at < len(changes):
        key, mode, size = _CHANGE.unpack_from(changes, at)
        at += _CHANGE.size
        if at + size > len(changes):
            raise ValueError(f"a change of {size} bytes at {at} of {len(changes)}")
        yield key, Mode(mode), changes[at : at + size]
        at += size


# ---- tables


def _group_changes(out: list[bytes], old: Parts, new: Parts, group: Group) -> None:
    present = [i for i, key in enumerate(group.keys) if new.get(key) != old.get(key)]
    if not present:
        return
    match = None
    rows_before, rows = _rows(old, group), _rows(new, group)
    if present[0] < group.naming and 0 < rows <= MAX_ROWS and rows_before:
        match = _Match.of(_names(old, group), _names(new, group))
        _put(out, group.keys[0], Mode.MATCH, *match.content())
        present = list(range(len(group.keys)))
    for i in present:
        key, row_bytes = group.keys[i], group.dtypes[i].itemsize * group.widths[i]
        after, before = new.get(key), old.get(key)
        if after is None:
            if before is not None:
                _put(out, key, Mode.DROP)
        elif not rows or before is None or (len(before), len(after)) != (rows_before * row_bytes, rows * row_bytes):
            _put(out, key, Mode.RAW, after)
        elif match is None:
            was, now = (np.frombuffer(data, group.dtypes[i]) for data in (before, after))
            _column_change(out, key, was, now)
        elif match.same(before, after, row_bytes):
            if fresh := match.fresh(after, row_bytes):
                _put(out, key, Mode.SPARSE, fresh, bytes(group.dtypes[i].itemsize + 4))
        else:
            was, now = (
                np.frombuffer(data, group.dtypes[i]).reshape(rows_, -1)
                for data, rows_ in ((before, rows_before), (after, rows))
            )
            stays = match.stays
            _column_change(out, key, was[match.source[stays]], now[stays], match.fresh(after, row_bytes))


class _Match:
    """Which row of before each row of after is: runs of neighbours (first, behind the last, was the first; -1: new)."""

    def __init__(self, source: I64) -> None:
        expected = np.where(source[:-1] >= 0, source[:-1] + 1, -1)
        self.source = source
        self.starts = np.concatenate(([0], np.flatnonzero(source[1:] != expected) + 1))
        self.stays = source >= 0
        starts = self.starts.tolist()
        self.runs = list(zip(starts, [*starts[1:], len(source)], source[self.starts].tolist(), strict=True))

    @classmethod
    def of(cls, before: NDArray[np.uint64], after: NDArray[np.uint64]) -> Self:
        """By name; the rows of each have different names, or are matched to the first of that name."""
        order = np.argsort(before, kind="stable")
        ranked = before[order]
        at = np.minimum(np.searchsorted(ranked, after), len(before) - 1)
        return cls(np.where(ranked[at] == after, order[at], -1))

    def content(self) -> tuple[bytes, ...]:
        """As MATCH has it."""
        sources = self.source[self.starts].astype("<i4")
        return _PAIR.pack(len(self.source), len(self.starts)), self.starts.astype("<u4").tobytes(), sources.tobytes()

    def same(self, before: bytes, after: bytes, size: int) -> bool:
        """Whether all matched rows, of `size` bytes, are what they were."""
        return all(
            before[of * size : (of + end - start) * size] == after[start * size : end * size]
            for start, end, of in self.runs
            if of >= 0
        )

    def fresh(self, after: bytes, size: int) -> bytes:
        """The new rows."""
        return b"".join(after[start * size : end * size] for start, end, of in self.runs if of < 0)


def _column_change(out: list[bytes], key: int, was: Unsigned, now: Unsigned, fresh: bytes = b"") -> None:
    moved: Unsigned = (now - was).reshape(-1)
    changed = int(np.count_nonzero(moved))
    base = moved.dtype.type(0)
    if 2 * changed > len(moved):
        base = np.partition(moved, len(moved) // 2)[len(moved) // 2]  # what most moved by, if most did alike
    rest: Unsigned = moved - base
    exceptions = np.flatnonzero(rest)
    if len(exceptions) * (4 + moved.itemsize) >= moved.nbytes:
        _put(out, key, Mode.DENSE, fresh, moved.tobytes())
        return
    count = len(exceptions).to_bytes(4, "little")
    listed = exceptions.astype("<u4").tobytes()
    _put(out, key, Mode.SPARSE, fresh, base.tobytes(), count, listed, rest[exceptions].tobytes())


def _patch_group(old: Parts, new: Parts, group: Group, found: dict[int, list[tuple[Mode, bytes]]]) -> None:
    source = None
    listed = found.get(group.keys[0], [])
    if listed and listed[0][0] is Mode.MATCH:
        source = _from_runs(listed.pop(0)[1], _rows(old, group))
    for i, key in enumerate(group.keys):
        before = old.get(key)
        if before is not None:
            was = np.frombuffer(before, group.dtypes[i])
            whole = source is not None and len(was) == _rows(old, group) * group.widths[i] and len(was)
            replaced = any(mode in (Mode.RAW, Mode.DROP) for mode, _ in found.get(key, ()))
            if whole and not replaced:
                assert source is not None
                _take(new, key, was.reshape(-1, group.widths[i]), source, found)
            else:
                new[key] = before
                _move(new, key, group, i, found)


def _move(new: Parts, key: int, group: Group, i: int, found: dict[int, list[tuple[Mode, bytes]]]) -> None:
    """Differences of a column whose rows are where they were."""
    left: list[tuple[Mode, bytes]] = []
    for mode, content in found.get(key, ()):
        if mode in (Mode.SPARSE, Mode.DENSE):
            was = np.frombuffer(new[key], group.dtypes[i])
            new[key] = (was + _moved(mode, content, was)).astype(was.dtype).tobytes()
        else:
            left.append((mode, content))
    found[key] = left


def _take(new: Parts, key: int, was: Unsigned, source: I64, found: dict[int, list[tuple[Mode, bytes]]]) -> None:
    """A column of which each row is an earlier one, moved by a difference, or new."""
    stays = source >= 0
    kept = was[source[stays]].reshape(-1)
    fresh_bytes = int(np.count_nonzero(~stays)) * was.shape[1] * was.itemsize
    fresh = b""
    for mode, content in found.pop(key, []):
        if mode not in (Mode.SPARSE, Mode.DENSE):
            raise ValueError(f"mode {mode.name} of a matched column")
        fresh = content[:fresh_bytes]
        kept = (kept + _moved(mode, content[fresh_bytes:], kept)).astype(was.dtype)
    now = np.empty((len(source), was.shape[1]), was.dtype)
    now[stays] = kept.reshape(-1, was.shape[1])
    now[~stays] = np.frombuffer(fresh, was.dtype).reshape(-1, was.shape[1])
    new[key] = now.tobytes()


def _moved(mode: Mode, content: bytes, like: Unsigned) -> Unsigned:
    if mode is Mode.DENSE:
        dense: Unsigned = np.frombuffer(content, like.dtype)
        if len(dense) != len(like):
            raise ValueError(f"{len(dense)} differences for {len(like)} entries")
        return dense
    size = like.itemsize
    moved: Unsigned = np.full(len(like), np.frombuffer(content[:size], like.dtype)[0], like.dtype)
    count = int.from_bytes(content[size : size + 4], "little")
    at = np.frombuffer(content, "<u4", count, size + 4)
    moved[at] += np.frombuffer(content, like.dtype, count, size + 4 + 4 * count)
    return moved


def _rows(parts: Parts, group: Group) -> int:
    return len(parts.get(group.keys[0], b"")) // group.dtypes[0].itemsize


def _names(parts: Parts, group: Group) -> NDArray[np.uint64]:
    """What names each row, as one number; wrong lengths make rows that match nothing."""
    first = np.frombuffer(parts[group.keys[0]], group.dtypes[0]).astype(np.uint64)
    for i in range(1, group.naming):
        more = np.frombuffer(parts.get(group.keys[i], b""), group.dtypes[i]).astype(np.uint64)
        if len(more) == len(first):
            first = first << np.uint64(32) | more
    return first


def _from_runs(content: bytes, rows_before: int) -> I64:
    rows, count = _PAIR.unpack_from(content)
    starts: I64 = np.frombuffer(content, "<u4", count, _PAIR.size).astype(np.int64)
    sources = np.frombuffer(content, "<i4", count, _PAIR.size + 4 * count).astype(np.int64)
    lengths = np.diff(np.append(starts, rows))
    if not 0 < count <= rows <= MAX_ROWS or starts[0] or (lengths <= 0).any():
        raise ValueError(f"{rows} rows are matched in {count} runs")
    run = np.repeat(np.arange(count), lengths)
    source = np.where(sources[run] >= 0, sources[run] + np.arange(rows) - starts[run], -1)
    if len(source) != rows or (source >= rows_before).any():
        raise ValueError("a row is matched to none")
    return source


# ---- the policy's memory, and everything else


def _memory_change(out: list[bytes], key: int, before: bytes, after: bytes) -> None:
    shared = min(len(before), len(after))
    old, new = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
    differs = np.flatnonzero(old[:shared] != new[:shared])
    if len(before) == len(after) and 5 * len(differs) < len(after) // 2:
        moved = (new[differs] - old[differs]).tobytes()
        listed = differs.astype("<u4").tobytes()
        _put(out, key, Mode.SPARSE, b"\0", len(differs).to_bytes(4, "little"), listed, moved)
        return
    head = int(differs[0]) if len(differs) else shared
    left = shared - head
    tail = np.flatnonzero(old[len(old) - left :][::-1] != new[len(new) - left :][::-1])
    kept = int(tail[0]) if len(tail) else left
    _put(out, key, Mode.SPLICE, _PAIR.pack(head, kept), after[head : len(after) - kept])


def _patch(new: Parts, key: int, mode: Mode, content: bytes) -> None:
    if mode is Mode.DROP:
        new.pop(key, None)
    elif mode is Mode.RAW:
        new[key] = content
    elif mode is Mode.SPLICE:
        head, tail = _PAIR.unpack_from(content)
        before = new.get(key, b"")
        if head + tail > len(before):
            raise ValueError(f"{head} + {tail} of {len(before)} bytes are the same")
        new[key] = before[:head] + content[_PAIR.size :] + before[len(before) - tail :]
    elif mode is Mode.SPARSE:
        was: NDArray[Any] = np.frombuffer(new.get(key, b""), np.uint8)
        new[key] = (was + _moved(mode, content, was)).astype(np.uint8).tobytes()
    else:
        raise ValueError(f"mode {mode.name} of part {key}")
