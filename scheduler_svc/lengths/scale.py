"""Lengths on a logarithmic scale, by integers alone: 32 steps an octave, so that one step is 2.2 %.

An answer of 20 instead of 10 tokens is as far off as one of 2,000 instead of 1,000: everything here that averages,
adds or corrects predictions does so on this scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64

OCTAVE: Final = 32
MAX_LOG: Final = 24 * OCTAVE


def _largest(holds: Callable[[int], bool], start: int) -> int:
    """The largest number from `start` on for which a falling predicate holds."""
    step = 1
    while holds(start + step):
        step *= 2
    low, high = start, start + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _bounds() -> I64:
    """The smallest integer at or above 2^(i / OCTAVE), for each i."""
    bounds, last = [], 1
    for i in range(MAX_LOG + 1):
        last = _largest(lambda n, power=2**i: (n - 1) ** OCTAVE < power, last)  # type: ignore[misc]
        bounds.append(last)
    return np.array(bounds, np.int64)


def _rounded() -> I64:
    """The integer nearest to 2^(i / OCTAVE), for each i."""
    found, last = [], 1
    for i in range(MAX_LOG + 1):
        last = _largest(lambda n, power=2 ** (i + OCTAVE): (2 * n - 1) ** OCTAVE <= power, last)  # type: ignore[misc]
        found.append(last)
    return np.array(found, np.int64)


_BOUNDS: Final = _bounds()
_ROUNDED: Final = _rounded()


def log_of(lengths: NDArray[np.integer]) -> I64:
    """floor(OCTAVE * log2(length)) of each; 0 for what is below 1."""
    logs: I64 = np.searchsorted(_BOUNDS, np.maximum(lengths, 1), side="right") - 1
    return logs


def length_of(logs: I64) -> I64:
    """Tokens, at least 1."""
    lengths: I64 = _ROUNDED[np.minimum(np.maximum(logs, 0), MAX_LOG)]
    return lengths
