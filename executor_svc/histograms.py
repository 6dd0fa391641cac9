"""How long answers have been, by tenant and endpoint: what the prediction of lengths learns from.

Bucket i counts lengths of at most 2^(i/2) tokens. Old answers fade: when a histogram holds WINDOW answers, all its
counts are halved. At most MAX_PAIRS pairs are kept, the one that was longest without an answer is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from jitney.columns import HISTOGRAM_BUCKETS, U32, HistogramTable

ANSWER_WEIGHT = 16
"""Counts of one answer, so that halving leaves a trace of few ones."""
WINDOW = 512
MAX_PAIRS = 65_536


def bucket(length: int) -> int:
    """The first bucket whose bound 2^(i/2) is not below the length, by integers alone."""
    if length <= 1:
        return 0
    return min(HISTOGRAM_BUCKETS - 1, (length * length - 1).bit_length())


def bound(index: int) -> int:
    """The largest length that bucket `index` counts: floor(2^(index/2))."""
    return int(2 ** (index // 2)) if index % 2 == 0 else int((2**index) ** 0.5)


class Histograms:
    """Decayed histograms, uint32 `[HISTOGRAM_BUCKETS]` each."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[int, int], U32] = OrderedDict()

    def add(self, tenant: int, endpoint: int, length: int) -> None:
        """An answer of `length` tokens."""
        pair = (tenant, endpoint)
        counts = self._counts.get(pair)
        if counts is None:
            counts = self._counts[pair] = np.zeros(HISTOGRAM_BUCKETS, np.uint32)
            if len(self._counts) > MAX_PAIRS:
                self._counts.popitem(last=False)
        self._counts.move_to_end(pair)
        counts[bucket(length)] += ANSWER_WEIGHT
        if int(counts.sum()) >= ANSWER_WEIGHT * WINDOW:
            counts >>= 1

    def quantile(self, tenant: int, endpoint: int, percent: int) -> int:
        """A length that so many percent of the answers did not exceed; -1: there were none."""
        counts = self._counts.get((tenant, endpoint))
        if counts is None:
            return -1
        total = np.cumsum(counts, dtype=np.int64)
        return bound(int(np.searchsorted(total * 100, int(total[-1]) * percent)))

    def table(self, pairs: Iterable[tuple[int, int]]) -> HistogramTable:
        """The histograms of these pairs that have any answer, by (tenant, endpoint)."""
        found = [(pair, self._counts[pair]) for pair in sorted(pairs) if pair in self._counts]
        if not found:
            return HistogramTable()
        return HistogramTable(
            tenant=np.array([tenant for (tenant, _), _ in found], np.uint32),
            endpoint=np.array([endpoint for (_, endpoint), _ in found], np.uint32),
            counts=np.concatenate([counts for _, counts in found]),
        )
