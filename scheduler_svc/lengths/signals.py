"""What the wording of a prompt says of the length of its answer: one weight for each count of each signal, added up.

The weights start from what the words mean ("briefly" shortens, "in detail" lengthens) and follow the answers that are
seen: each answer moves the weights of its own counts towards it, those that were seen often by little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from jitney.columns import I64, U64
from jitney.features import FEATURE_BITS, MAX_COUNT, Feature
from scheduler_svc.lengths.scale import OCTAVE

BINS: Final = 16
FINE: Final = 64
"""Parts of a step of the scale: what corrections and leaves are counted in."""
_GRAIN: Final = 4096
"""Parts of a step that weights are counted in: a small share of a small error still moves one."""
FEATURES: Final = len(Feature)
_SHIFTS: Final = np.array([3 if f in (Feature.NUMBER_ASKED, Feature.LENGTH) else 0 for f in Feature], np.int64)
_PLACES: Final = np.arange(FEATURES, dtype=np.int64) * BINS
_BIT_SHIFTS: Final = np.arange(0, 64, FEATURE_BITS, dtype=np.uint64)
_FIRST_GUESS: Final = 7 * OCTAVE * _GRAIN  # 128 tokens
_MEANINGS: Final = {Feature.BRIEF: -3, Feature.LONG: 2, Feature.LIST: 1, Feature.CODE: 1}
"""Half octaves that at least one such word adds."""
_CLIP: Final = 2 * OCTAVE * _GRAIN
_CHUNK: Final = 16
_MOST: Final = 24 * OCTAVE * _GRAIN
_PRIOR: Final = 4
_SEEN_MOST: Final = 128


@dataclass(slots=True)
class Signals:
    """`weights` [FEATURES * BINS] and how many answers moved each, `seen`."""

    weights: I64
    seen: I64

    @classmethod
    def fresh(cls) -> Self:
        """Before any answer."""
        weights = np.zeros((FEATURES, BINS), np.int64)
        weights[Feature.TURNS] = _FIRST_GUESS
        for feature, half_octaves in _MEANINGS.items():
            weights[feature, 1:] = half_octaves * OCTAVE * _GRAIN // 2
        return cls(weights.reshape(-1), np.zeros(FEATURES * BINS, np.int64))

    def predict(self, features: U64) -> I64:
        """Logarithms of lengths [N]."""
        logs: I64 = np.maximum(self.weights[_bins(features)].sum(axis=1) // _GRAIN, 0)
        return logs

    def learn(self, features: U64, logs: I64) -> None:
        """Answers of such lengths, in the order in which they ended."""
        for start in range(0, len(logs), _CHUNK):
            bins = _bins(features[start : start + _CHUNK])
            wrong = _GRAIN * logs[start : start + _CHUNK] - self.weights[bins].sum(axis=1)
            wrong = np.minimum(np.maximum(wrong, -_CLIP), _CLIP)
            places = bins.reshape(-1)
            errors, counts = np.zeros_like(self.weights), np.bincount(places, minlength=len(self.weights))
            np.add.at(errors, places, np.repeat(wrong, FEATURES))
            self.weights += errors // (FEATURES * (_PRIOR + self.seen + counts))
            self.weights = np.minimum(np.maximum(self.weights, -_MOST), _MOST)
            self.seen = np.minimum(self.seen + counts, _SEEN_MOST)


def _bins(features: U64) -> I64:
    """Places of the weights [N, FEATURES]."""
    counts = (features[:, None] >> _BIT_SHIFTS & np.uint64(MAX_COUNT)).astype(np.int64)
    bins: I64 = np.minimum(counts >> _SHIFTS, BINS - 1) + _PLACES
    return bins
