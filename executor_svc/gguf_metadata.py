"""The key-value part of a GGUF file, read directly: no tensor is touched.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The hundred
thousand strings of a vocabulary take some 30 ms this way, where a general reader takes seconds; so nothing of it
needs caching.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import cast

import numpy as np

from jitney.errors import InvalidRequest

Value = bool | int | float | str | list["Value"]
"""What a GGUF key holds; an array is a list."""

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
_MAX_DEPTH = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_gguf_metadata(path: Path) -> dict[str, Value]:
    """All keys of the file with their values. Raises InvalidRequest, in one sentence, if it is no whole GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).keys()
    except ValueError as error:  # an empty file cannot be mapped
        raise InvalidRequest(f"{path} is empty", field="model", value=path) from error
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="model", value=path) from error


class _Reader:
    """A cursor over the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def keys(self) -> dict[str, Value]:
        if self._data[:4] != MAGIC:
            raise self._wrong("is no GGUF file: it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise self._wrong(f"has GGUF version {version}, known are 2 and 3 (little-endian)")
        self._number("Q")  # tensors
        count = self._number("Q")
        if count > MAX_KEYS:
            raise self._wrong(f"claims {count} keys, at most {MAX_KEYS} are read")
        found: dict[str, Value] = {}
        for _ in range(count):
            key = self._string()
            found[key] = self._value(self._number("I"))
        return found

    def _value(self, kind: int, depth: int = 0) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        return self._scalar(kind)

    def _scalar(self, kind: int) -> Value:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._wrong(f"has a value of unknown type {kind}")
        return cast(Value, struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0])

    def _array(self, depth: int) -> Value:
        kind, count = self._number("I"), self._number("Q")
        if depth > _MAX_DEPTH or count > len(self._data):
            raise self._wrong(f"has an array of {count} entries that cannot be")
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind])
            return cast(Value, np.frombuffer(self._take(dtype.itemsize * count), dtype).tolist())
        if kind == _STRING:
            return cast(Value, self._strings(count))
        return [self._value(kind, depth) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        data, at, size = self._data, self._at, struct.Struct("<Q")
        found: list[str] = []
        try:
            for _ in range(count):
                end = at + 8 + size.unpack_from(data, at)[0]
                found.append(data[at + 8 : end].decode("utf-8", "replace"))
                at = end
        except struct.error as error:
            raise self._truncated() from error
        if at > len(data):
            raise self._truncated()
        self._at = at
        return found

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _number(self, code: str) -> int:
        return int(struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0])

    def _take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) < size:
            raise self._truncated()
        self._at += size
        return part

    def _truncated(self) -> InvalidRequest:
        return self._wrong(f"is truncated: it ends after {len(self._data)} bytes, inside its keys")

    def _wrong(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self._path} {what}", field="model", value=self._path)
