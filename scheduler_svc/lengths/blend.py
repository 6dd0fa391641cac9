"""Several predictions made one, by how well each has done lately.

Each source is kept with the mean error of its p50 in tokens, which fades over some hundred answers, and with how far
its p50 and p90 lie off on the logarithmic scale. An answer that is longer than a predicted quantile moves it up, one
that is not moves it down, in the proportion that makes it the quantile in the long run (adaptive conformal prediction:
Gibbs and Candes, 2021); the same correction keeps the p90 of the blend at 90 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np

from jitney.columns import I64
from scheduler_svc.lengths.scale import OCTAVE, length_of, log_of
from scheduler_svc.lengths.signals import BINS, FEATURES, FINE, Signals
from scheduler_svc.memory import LENGTHS, Memory


class Source(IntEnum):
    """Where predictions come from."""

    HISTORY = 0
    SIGNALS = 1
    LEARNED = 2


VERSION: Final = 1
UNKNOWN: Final = -1
CENT: Final = 100
MOST_ERROR_TOKENS: Final = 10_000_000
FADE: Final = 256
"""Answers after which an error has mostly faded."""
SHARPNESS: Final = 8
"""A source with twice the error of the best weighs 2^SHARPNESS times less."""
_ONE: Final = 1 << 10
_STEP: Final = OCTAVE * FINE // 64
_FIRST_SPREAD: Final = 5 * OCTAVE * FINE // 4
_OFF_MOST: Final = 8 * OCTAVE * FINE
_PERCENTS: Final = np.array([50] * len(Source) + [90] * len(Source) + [90])
_LOWEST: Final = np.array([-_OFF_MOST] * len(Source) + [0] * len(Source) + [-_OFF_MOST])
_AT_ONCE: Final = 4
_SPEED: Final = 24
"""Corrections are this many times larger for the first answers, and fall to their least over as many."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What the sources say: logarithms [S, N], UNKNOWN where one says nothing. p90 may be unknown where p50 is not."""

    p50: I64
    p90: I64


@dataclass(slots=True)
class Blend:
    """[S] each: `errors` in hundredths of a token, the others in FINE parts of a step. `off90` is that of the blend."""

    signals: Signals = field(default_factory=Signals.fresh)
    seen: I64 = field(default_factory=lambda: np.zeros(len(Source), np.int64))
    errors: I64 = field(default_factory=lambda: np.zeros(len(Source), np.int64))
    off50: I64 = field(default_factory=lambda: np.zeros(len(Source), np.int64))
    spread: I64 = field(default_factory=lambda: np.full(len(Source), _FIRST_SPREAD, np.int64))
    off90: int = 0

    @classmethod
    def read(cls, memory: Memory) -> Blend:
        """As the last decision left it."""
        content = memory.get(LENGTHS, VERSION)
        count = FEATURES * BINS
        if len(content) != 4 * (4 * len(Source) + 1 + 2 * count):
            return cls()
        kept = np.frombuffer(content, "<i4").astype(np.int64)
        seen, errors, off50, spread = kept[: 4 * len(Source)].reshape(4, -1).copy()
        rest = kept[4 * len(Source) :]
        signals = Signals(rest[1 : count + 1].copy(), rest[count + 1 :].copy())
        return cls(signals, seen, errors, off50, spread, int(rest[0]))

    def write(self, memory: Memory) -> None:
        """For the next decision."""
        parts = (self.seen, self.errors, self.off50, self.spread, [self.off90], self.signals.weights, self.signals.seen)
        memory.put(LENGTHS, VERSION, np.concatenate(parts).astype("<i4").tobytes())

    def corrected(self, guess: Guess) -> Guess:
        """Each source's p50 and p90 [S, N], corrected by how far it was off."""
        known, off50 = guess.p50 >= 0, (self.off50 // FINE)[:, None]
        p50 = np.where(known, np.maximum(guess.p50 + off50, 0), UNKNOWN)
        p90 = np.where(guess.p90 >= 0, guess.p90 + off50, p50 + (self.spread // FINE)[:, None])
        return Guess(p50, np.where(known, np.maximum(p90, p50), UNKNOWN))

    @property
    def weights(self) -> I64:
        """Of each source [S]; one that was not tried yet counts as the best."""
        tried = [max(error, CENT) for error, seen in zip(self.errors.tolist(), self.seen.tolist(), strict=True) if seen]
        least = min(tried, default=CENT)
        found = []
        for error, seen in zip(self.errors.tolist(), self.seen.tolist(), strict=True):
            ratio = (least << 10) // max(error, CENT) if seen else _ONE
            found.append(max(ratio**SHARPNESS >> 10 * (SHARPNESS - 1), 1))
        return np.array(found, np.int64)

    def blended(self, corrected: Guess) -> tuple[I64, I64]:
        """p50 and p90 [N], as logarithms; UNKNOWN where no source says anything."""
        weight = np.where(corrected.p50 >= 0, self.weights[:, None], 0)
        total = weight.sum(axis=0)
        at_least = np.maximum(total, 1)
        half = at_least >> 1
        p50 = ((weight * corrected.p50).sum(axis=0) + half) // at_least
        p90 = ((weight * corrected.p90).sum(axis=0) + half) // at_least + self.off90 // FINE
        return np.where(total > 0, p50, UNKNOWN), np.where(total > 0, np.maximum(p90, p50), UNKNOWN)

    def learn(self, corrected: Guess, blended90: I64, lengths: I64) -> None:
        """Answers of `lengths` [N], and what was predicted of them."""
        known = corrected.p50 >= 0
        count = known.sum(axis=1)
        error = np.minimum(np.abs(length_of(corrected.p50) - lengths), MOST_ERROR_TOKENS)
        missed = np.where(known, error, 0).sum(axis=1) * CENT
        fade = np.maximum(np.minimum(self.seen + count, FADE), np.maximum(count, 1))
        self.errors += (missed - count * self.errors) // fade
        quantiles = np.concatenate((corrected.p50, corrected.p90, blended90[None]))
        seen = np.concatenate((self.seen, self.seen, self.seen.max(keepdims=True)))
        off = np.concatenate((self.off50, self.spread, (self.off90,))) + _pull(log_of(lengths), quantiles, seen)
        off = np.minimum(np.maximum(off, _LOWEST), _OFF_MOST)
        self.off50, self.spread, self.off90 = off[: len(Source)], off[len(Source) : -1], int(off[-1])
        self.seen = np.minimum(self.seen + count, FADE)


def _pull(logs: I64, quantiles: I64, seen: I64) -> I64:
    """How far to move quantiles [2 S + 1, N] after answers of `logs` [N], in FINE parts of a step [2 S + 1]; by the
    share of those above, as if there had been at most _AT_ONCE."""
    known = quantiles >= 0
    above, count = ((logs > quantiles) & known).sum(axis=1), known.sum(axis=1)
    step = _STEP * np.maximum(4 * _SPEED // (4 + seen), 1) * np.minimum(count, _AT_ONCE)
    pulled: I64 = step * (100 * above - (100 - _PERCENTS) * count) // (50 * np.maximum(count, 1))
    return pulled
