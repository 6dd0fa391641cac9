"""Packed fields of the cache's messages: numbers are uint64 little-endian, keys 32 bytes each, codes one byte each.

Bytes that cannot be what they stand for raise InvalidRequest with the field, the limit and the value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, cast

import numpy as np

from jitney.block_ops import Block, BlockState, ResultCode, Tier
from jitney.errors import InvalidRequest
from jitney.keys import KEY_BYTES, Key

NUMBER_BYTES = 8
_KEY = np.dtype(f"V{KEY_BYTES}")
_CODES = tuple(ResultCode)


def pack(numbers: Sequence[int]) -> bytes:
    """Handles, slots or checksums. ValueError for a number out of range."""
    if len(numbers) == 1 and numbers[0] >> 64 == 0:  # most lists of handles have one
        return numbers[0].to_bytes(NUMBER_BYTES, "little")
    try:
        return struct.pack(f"<{len(numbers)}Q", *numbers)
    except struct.error as error:
        raise ValueError(f"a number is out of range: {error}") from error


def unpack(data: bytes, field: str) -> list[int]:
    """Back again."""
    if not data:
        return []
    if len(data) == NUMBER_BYTES:
        return [int.from_bytes(data, "little")]
    _multiple(data, NUMBER_BYTES, field)
    return list(struct.unpack(f"<{len(data) // NUMBER_BYTES}Q", data))


def handles(data: bytes, field: str) -> list[Block]:
    """Handles of blocks."""
    return cast(list[Block], unpack(data, field))


def split_keys(data: bytes, field: str) -> list[Key]:
    """The keys that stand one behind the other."""
    if not data:
        return []
    _multiple(data, KEY_BYTES, field)
    keys: list[Key] = np.frombuffer(data, _KEY).tolist()
    return keys


def _multiple(data: bytes, size: int, field: str) -> None:
    if len(data) % size:
        raise InvalidRequest(
            f"{field} has {len(data)} bytes, no multiple of {size}", field=field, limit=size, value=len(data)
        )


def codes_of(data: bytes, field: str) -> list[ResultCode]:
    """One a byte."""
    try:
        return [_CODES[code] for code in data]
    except IndexError as error:
        raise InvalidRequest(
            f"{field}: result code {max(data)} is unknown", field=field, limit=int(max(_CODES)), value=max(data)
        ) from error


def wire(number: IntEnum) -> Any:
    """The number of an enum value; the stubs ask for a type that exists at type checking only."""
    return int(number)


def code_of(number: int, field: str) -> ResultCode:
    """Of the number of an enum."""
    return codes_of(bytes((min(number, 255),)), field)[0]


def tier_of(number: int) -> Tier:
    """Of a Swap."""
    try:
        return Tier(number)
    except ValueError as error:
        raise InvalidRequest(
            f"swaps.tier {number} is unknown", field="swaps.tier", limit=int(max(Tier)), value=number
        ) from error


def state_of(number: int) -> BlockState:
    """Of a declared block."""
    try:
        return BlockState(number)
    except ValueError as error:
        raise InvalidRequest(
            f"blocks.state {number} is unknown", field="blocks.state", limit=int(max(BlockState)), value=number
        ) from error
