"""The door's small questions: each answers with the value, or with InvalidRequest naming field, limit and value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jitney.columns import I32, I64
from jitney.errors import InvalidRequest


def wrong(field: str, what: str, limit: object, value: object) -> InvalidRequest:
    """The error; `what` is the sentence."""
    return InvalidRequest(what, field=field, limit=limit, value=value)


def integer(field: str, value: int, least: int, most: int, unit: str = "") -> int:
    """`value`, if it is between `least` and `most`, both included."""
    if not least <= value <= most:
        what = f"{field} must be between {least} and {most}{' ' + unit if unit else ''}, not {value}"
        raise wrong(field, what, f"{least} to {most}", value)
    return value


def real(field: str, value: float, least: float, most: float, *, least_allowed: bool = True) -> float:
    """`value`, if it is a number between `least` and `most`; `least` itself only where `least_allowed`."""
    if math.isnan(value) or not (least <= value <= most) or (value == least and not least_allowed):
        interval = f"{'[' if least_allowed else '('}{least:g}, {most:g}]"
        raise wrong(field, f"{field} must be in {interval}, not {value:g}", interval, f"{value:g}")
    return value


def short(field: str, value: str, most_bytes: int) -> str:
    """`value`, if it has at most so many bytes of UTF-8."""
    size = len(value.encode())
    if size > most_bytes:
        raise wrong(field, f"{field} may have {most_bytes} bytes, not {size}", f"{most_bytes} bytes", f"{size} bytes")
    return value


def name(field: str, value: str, most_bytes: int) -> str:
    """As `short`, and printable: names go into logs and onto screens."""
    short(field, value, most_bytes)
    if not value.isprintable():
        odd = next(c for c in value if not c.isprintable())
        what = f"{field} must be printable, not hold U+{ord(odd):04X}"
        raise wrong(field, what, "printable UTF-8", ascii(value))
    return value


def count(field: str, size: int, most: int) -> int:
    """`size`, if there are at most so many entries."""
    if size > most:
        raise wrong(field, f"{field} may have {most} entries, not {size}", most, size)
    return size


def token_ids(field: str, ids: Sequence[int] | I32, vocabulary: int) -> I32:
    """The ids as int32, if all of them are in the vocabulary."""
    array: I64 = np.asarray(ids, np.int64)
    outside = np.flatnonzero((array < 0) | (array >= vocabulary))
    if len(outside):
        at, value = int(outside[0]), int(array[outside[0]])
        what = f"{field}[{at}] is {value}, the vocabulary has {vocabulary} tokens"
        raise wrong(f"{field}[{at}]", what, f"0 to {vocabulary - 1}", value)
    return array.astype(np.int32)
