"""How soon a block that nobody holds is used again: learned from what happened to others of its class.

A class says how a block was used so far, an age how long nobody has used it, in blocks that came to rest since then.
From the ages at which blocks were used again, and those of the blocks that still wait, comes the chance of reuse in
each age (the actuarial estimate of a survival curve), drawn towards that of all classes where a class has little to
say. The *value* of keeping a block at an age is the best rate of hits per time that it can still earn, over all times
for which one might keep it: the Gittins index of the block as a bandit that pays once. Blocks compete for room by
values, so that one whose reuse is likely but far away may go before one whose reuse is unlikely but soon.

References: Gittins, "Bandit processes and dynamic allocation indices" (JRSS B, 1979); Beckmann, Chen and Cidon, "LHD:
Improving cache hit rate by maximizing hit density" (NSDI 2018), which ranks by hits per space and time in classes too.

Counts are integers, and floating-point numbers are only added, multiplied and divided, in a fixed order: the same uses
give the same values on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64

F64 = NDArray[np.float64]

AGES = 64
"""Buckets of ages, two for each doubling: up to 2^32 blocks."""
PRIOR = 20
"""Blocks that a class must have seen to count as much as all classes together."""
MOST_EVENTS = 1 << 16
"""Above so many, what is long past is halved."""


def age_bucket(age: int) -> int:
    """The bucket of an age from 0 on: 0, 1, 2, 3, 4-5, 6-7, 8-11, 12-15, ..."""
    if age < 2:
        return age
    octave = age.bit_length() - 1
    return min(AGES - 1, 2 * octave + (age >> (octave - 1) & 1))


WIDTH = np.array([1.0, 1.0, *(float(1 << max(0, (bucket >> 1) - 1)) for bucket in range(2, AGES))])


class ReuseProfile:
    """`values[class][age bucket]`: hits per block of time, never rising with the age; empty until the first `learn`."""

    __slots__ = ("_gone", "_used", "values")

    def __init__(self, classes: int) -> None:
        self._used: I64 = np.zeros((classes, AGES), np.int64)
        self._gone: I64 = np.zeros((classes, AGES), np.int64)
        self.values: list[list[float]] = []

    def used(self, kind: int, age: int) -> None:
        """A block of this class was used again at this age."""
        self._used[kind, age_bucket(age)] += 1

    def gone(self, kind: int, age: int) -> None:
        """A block of this class was lost sight of at this age, unused."""
        self._gone[kind, age_bucket(age)] += 1

    def learn(self, kinds: I64, ages: I64) -> F64:
        """Computes the values anew from the classes and ages [N] of the watched blocks that are not used yet.

        Returns their values [N].
        """
        buckets = _age_buckets(ages)
        idle = self._gone.copy()
        np.add.at(idle, (kinds, buckets), 1)
        ended = self._used + idle
        at_risk = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1]
        exposed = at_risk - ended / 2.0
        chance = self._used.sum(axis=0) / np.maximum(np.cumsum(exposed, axis=0)[-1], 1.0)
        chance = (self._used + PRIOR * chance) / (exposed + PRIOR)
        values = _values(np.minimum(chance, 0.999))
        self.values = values.tolist()
        if int(self._used.sum()) > MOST_EVENTS:
            self._used //= 2
            self._gone //= 2
        return values[kinds, buckets]


def _age_buckets(ages: I64) -> I64:
    """`age_bucket` of each; exact, as an exponent is."""
    octaves = np.maximum(np.frexp(ages.astype(np.float64))[1].astype(np.int64) - 1, 1)
    buckets = 2 * octaves + (ages >> (octaves - 1) & 1)
    return np.where(ages < 2, ages, np.minimum(buckets, AGES - 1))


def _values(chance: F64) -> F64:
    """Best hits per time from each age on. `chance` [class, age bucket] is that of a use within the bucket."""
    classes = len(chance)
    alive = np.concatenate([np.ones((classes, 1)), np.multiply.accumulate(1.0 - chance, axis=1)], axis=1)
    lived = (alive[:, :-1] + alive[:, 1:]) / 2.0 * WIDTH
    time = np.concatenate([np.zeros((classes, 1)), np.cumsum(lived, axis=1)], axis=1)
    best = np.zeros((classes, AGES))
    for age in range(AGES):
        hits = alive[:, age : age + 1] - alive[:, age + 1 :]
        spent = time[:, age + 1 :] - time[:, age : age + 1]
        best[:, age] = np.divide(hits, spent, out=np.zeros_like(hits), where=spent > 0).max(axis=1)
    return np.maximum.accumulate(best[:, ::-1], axis=1)[:, ::-1]
