"""Philox 4x32-10: random numbers by counter, so that any draw can be made again without those before it.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I32, U64

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


def philox(counter: tuple[U64, U64, U64, U64], key: tuple[U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Four 32-bit words for each counter and key; all words are uint64 arrays `[n]` of values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> _SHIFT) ^ c1 ^ k0, second & _LOW, (first >> _SHIFT) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seed: U64, choice: I32, position: I32, draw: int = 0) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice, position, draw)."""
    seed = seed.astype(np.uint64)
    words = (np.full(len(seed), draw, np.uint64), _word(position), _word(choice), np.zeros(len(seed), np.uint64))
    high, low, _, _ = philox(words, (seed & _LOW, seed >> _SHIFT))
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def _word(values: I32) -> U64:
    return values.astype(np.int64).astype(np.uint64) & _LOW
