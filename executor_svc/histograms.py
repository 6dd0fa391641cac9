"""How long answers have been, by tenant and endpoint: what the prediction of lengths learns from.

Bucket i counts lengths of at most 2^(i/2) tokens. Old answers fade: when a histogram holds WINDOW answers, all its
counts are halved. At most MAX_PAIRS pairs are kept, the one that was longest without an answer is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from jitney.columns import HISTOGRAM_BUCKETS, I64, U32, HistogramTable

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


def pair_of(tenant: int, endpoint: int) -> int:
    """A tenant and an endpoint as one number."""
    return tenant << 32 | endpoint


class Histograms:
    """Decayed histograms, uint32 `[pairs, HISTOGRAM_BUCKETS]`; the order of `_rows` is that of the newest answers."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, int] = OrderedDict()  # by pair, see `pair_of`
        self._counts: U32 = np.zeros((64, HISTOGRAM_BUCKETS), np.uint32)

    def add(self, tenant: int, endpoint: int, length: int) -> None:
        """An answer of `length` tokens."""
        pair = pair_of(tenant, endpoint)
        row = self._rows.get(pair)
        if row is None:
            row = self._rows[pair] = self._new_row()
        self._rows.move_to_end(pair)
        counts = self._counts[row]
        counts[bucket(length)] += ANSWER_WEIGHT
        if int(counts.sum()) >= ANSWER_WEIGHT * WINDOW:
            counts >>= 1

    def _new_row(self) -> int:
        if len(self._rows) == MAX_PAIRS:
            _, row = self._rows.popitem(last=False)
            self._counts[row] = 0
            return row
        row = len(self._rows)
        if row == len(self._counts):
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        return row

    def quantile(self, tenant: int, endpoint: int, percent: int) -> int:
        """A length that so many percent of the answers did not exceed; -1: there were none."""
        row = self._rows.get(pair_of(tenant, endpoint))
        if row is None:
            return -1
        total = np.cumsum(self._counts[row], dtype=np.int64)
        return bound(int(np.searchsorted(total * 100, int(total[-1]) * percent)))

    def table(self, pairs: I64) -> HistogramTable:
        """The histograms of those pairs (see `pair_of`) that have any answer, in the order given."""
        rows = np.array([self._rows.get(pair, -1) for pair in pairs.tolist()], np.int64)
        known = rows >= 0
        if not known.any():
            return HistogramTable()
        found = pairs[known]
        return HistogramTable(
            tenant=(found >> 32).astype(np.uint32),
            endpoint=(found & 0xFFFFFFFF).astype(np.uint32),
            counts=self._counts[rows[known]].reshape(-1),
        )
