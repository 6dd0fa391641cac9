"""What requests like this one were answered: quantiles of the histogram of its tenant and endpoint.

Inside a bucket lengths are taken to be spread evenly on the logarithmic scale. Of a row that has an answer of g tokens
already, only the answers that were longer count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jitney.columns import HISTOGRAM_BUCKETS, I64, U32, HistogramTable
from scheduler_svc.lengths.scale import OCTAVE

BUCKET = OCTAVE // 2
WIDTH = HISTOGRAM_BUCKETS + 1
APART = 1 << 46
"""Above 100 times what 32 counts of 32 bits can add up to."""
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class History:
    """Histograms of P (tenant, endpoint) pairs, in rising order. `below` [P * WIDTH] is, for each bucket of each pair,
    how many answers are in buckets before it; `scaled` [P * BUCKETS] is 100 times how many are up to and in it, with
    those of a pair moved above all of the pair before, so that one search finds the bucket of any pair."""

    pairs: I64
    below: I64
    scaled: I64

    @classmethod
    def of(cls, table: HistogramTable) -> History:
        """As the executor sends them."""
        pairs = _pairs(table.tenant, table.endpoint)
        order = np.argsort(pairs, kind="stable")
        below = np.zeros((len(pairs), WIDTH), np.int64)
        np.cumsum(table.counts.reshape(-1, HISTOGRAM_BUCKETS)[order], axis=1, out=below[:, 1:])
        scaled = 100 * below[:, 1:] + np.arange(len(pairs))[:, None] * APART
        return cls(pairs[order], below.reshape(-1), scaled.reshape(-1))

    def rows(self, tenants: U32, endpoints: U32) -> I64:
        """The place of each pair, UNKNOWN without a histogram."""
        wanted = _pairs(tenants, endpoints)
        if len(self.pairs) == 0:
            return np.full(len(wanted), UNKNOWN, np.int64)
        places = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        return np.where(self.pairs[places] == wanted, places, UNKNOWN)

    def quantiles(self, rows: I64, answered: I64, percents: tuple[int, ...]) -> list[I64]:
        """Logarithms of the lengths that so many percent of the answers longer than `answered` did not exceed; UNKNOWN
        for a row without a histogram, or if no answer was longer. `answered` are logarithms, UNKNOWN for none."""
        if len(self.pairs) == 0:
            return [np.full(len(rows), UNKNOWN, np.int64) for _ in percents]
        first = np.maximum(rows, 0) * WIDTH
        total = self.below[first + HISTOGRAM_BUCKETS]
        bucket = np.minimum(-(-np.maximum(answered, 0) // BUCKET), HISTOGRAM_BUCKETS - 1)
        before, after = self.below[first + bucket], self.below[first + bucket + 1]
        inside = (after - before) * (answered - BUCKET * (bucket - 1)) // BUCKET
        gone = np.where(answered < 0, 0, np.minimum(np.where(bucket > 0, before + inside, after), total))
        known = (rows >= 0) & (total > gone)
        found = []
        for percent in percents:
            target = 100 * gone + percent * (total - gone)
            at = np.searchsorted(self.scaled, target + np.maximum(rows, 0) * APART)
            bucket = np.minimum(at - first // WIDTH * HISTOGRAM_BUCKETS, HISTOGRAM_BUCKETS - 1)
            before, after = self.below[first + bucket], self.below[first + bucket + 1]
            into = BUCKET * (target - 100 * before) // np.maximum(100 * (after - before), 1)
            logs = np.maximum(np.where(bucket > 0, BUCKET * (bucket - 1) + into, 0), answered)
            found.append(np.where(known, logs, UNKNOWN))
        return found


def _pairs(tenants: U32, endpoints: U32) -> I64:
    return tenants.astype(np.int64) << 32 | endpoints
