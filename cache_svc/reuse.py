"""How soon a block that nobody holds is used again: learned from what happened to others of its class.

A class is a pair: how a block was used so far, its *habit*, and how long the answer was that was generated behind it.
An age says how long nobody has used it, in blocks that came to rest since then. From the ages at which blocks were used
again, and those of the blocks that still wait, comes the chance of reuse in each age (the actuarial estimate of a
survival curve). Where a class has little to say, it is drawn towards the chance of all blocks at that age, times how
much more often than all its habit and its answers are used again: proportional hazards, of which the factors are found
in turn until they agree (iterative proportional fitting).

The *value* of keeping a block at an age is the best rate of hits per time that it can still earn, over all times for
which one might keep it: the Gittins index of the block as a bandit that pays once. Blocks compete for room by values,
so that one whose reuse is likely but far away may go before one whose reuse is unlikely but soon.

References: Gittins, "Bandit processes and dynamic allocation indices" (JRSS B, 1979); Cox, "Regression models and
life-tables" (JRSS B, 1972); Beckmann, Chen and Cidon, "LHD: Improving cache hit rate by maximizing hit density" (NSDI
2018), which ranks by hits per space and time in classes too.

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
PRIOR = 50
"""Blocks that a class must have seen at an age to count as much there as what all blocks say of it."""
FEW_USES = 5
FEW_USES_OF_CLASS = 20
"""Uses that are expected of a habit or a length of answers, or of a class, before it counts much."""
ROUNDS = 3
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

    __slots__ = ("_answers", "_gone", "_used", "values")

    def __init__(self, habits: int, answers: int = 1) -> None:
        """The class of a habit and a length of answers is `habit * answers + answer`."""
        self._answers = answers
        self._used: I64 = np.zeros((habits * answers, AGES), np.int64)
        self._gone: I64 = np.zeros((habits * answers, AGES), np.int64)
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
        chance = self._used.sum(axis=0) / np.maximum(_total(exposed.T), 1.0)
        often = self._how_often(self._used.sum(axis=1), _total(exposed * chance))
        chance = (self._used + PRIOR * often[:, None] * chance) / (exposed + PRIOR)
        used_ages = int(np.flatnonzero(self._used.sum(axis=0)).max(initial=-1)) + 1
        values = _values(np.minimum(chance, 0.999), used_ages)
        self.values = values.tolist()
        if int(self._used.sum()) > MOST_EVENTS:
            self._used //= 2
            self._gone //= 2
        return values[kinds, buckets]

    def _how_often(self, uses: I64, expected: F64) -> F64:
        """[class] how much more often than others it is used again; `expected` are its uses if it were like all."""
        used, like_all = uses.reshape(-1, self._answers), expected.reshape(-1, self._answers)
        answer = np.ones(self._answers)
        for _ in range(ROUNDS):
            habit = (used.sum(axis=1) + FEW_USES) / (_total(like_all * answer) + FEW_USES)
            answer = (used.sum(axis=0) + FEW_USES) / (_total((like_all * habit[:, None]).T) + FEW_USES)
        both = habit[:, None] * answer
        often: F64 = both * (used + FEW_USES_OF_CLASS) / (like_all * both + FEW_USES_OF_CLASS)
        return often.ravel()


def _total(values: F64) -> F64:
    """The sum along the last axis, one after the other."""
    total: F64 = np.cumsum(values, axis=-1)[..., -1]
    return total


def _age_buckets(ages: I64) -> I64:
    """`age_bucket` of each; exact, as an exponent is."""
    octaves = np.maximum(np.frexp(ages.astype(np.float64))[1].astype(np.int64) - 1, 1)
    buckets = 2 * octaves + (ages >> (octaves - 1) & 1)
    return np.where(ages < 2, ages, np.minimum(buckets, AGES - 1))


def _values(chance: F64, used_ages: int) -> F64:
    """Best hits per time from each age on. `chance` [class, age bucket] is that of a use within the bucket, 0 from
    bucket `used_ages` on."""
    classes = len(chance)
    alive = np.concatenate([np.ones((classes, 1)), np.multiply.accumulate(1.0 - chance, axis=1)], axis=1)
    lived = (alive[:, :-1] + alive[:, 1:]) / 2.0 * WIDTH
    time = np.concatenate([np.zeros((classes, 1)), np.cumsum(lived, axis=1)], axis=1)
    best = np.zeros((classes, AGES))
    for age in range(used_ages):
        hits = alive[:, age : age + 1] - alive[:, age + 1 : used_ages + 1]
        spent = time[:, age + 1 : used_ages + 1] - time[:, age : age + 1]
        best[:, age] = np.divide(hits, spent, out=np.zeros_like(hits), where=spent > 0).max(axis=1)
    return np.maximum.accumulate(best[:, ::-1], axis=1)[:, ::-1]
