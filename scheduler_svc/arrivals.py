"""When requests arrived, for a policy whose waiting columns leave no room for it: marks in its memory say which id was
the newest at some times, and ids rise with arrival."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64, U64

MAX_MARKS: Final = 64
_MARK: Final = np.dtype([("id", "<u8"), ("at_us", "<i8")])


def marked(memory: bytes, ids: U64, now_us: int, every_us: int) -> NDArray[Any]:
    """Marks (newest id, time), rising, with one for now if there are new ids and the last one is old enough."""
    marks = np.frombuffer(memory, _MARK, len(memory) // _MARK.itemsize)
    if len(ids) == 0:
        return marks
    newest = ids.max()
    if len(marks) and (newest <= marks["id"][-1] or now_us - marks["at_us"][-1] < every_us):
        return marks
    return np.append(marks, np.array([(newest, now_us)], _MARK))[-MAX_MARKS:]


def arrivals(marks: NDArray[Any], ids: U64, now_us: int) -> I64:
    """When each id was new, as far as the marks say."""
    times = np.append(marks["at_us"], now_us)
    return times[np.searchsorted(marks["id"], ids)]
