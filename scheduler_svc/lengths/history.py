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
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class History:
    """Cumulated counts [P, buckets + 1], by (tenant, endpoint) in rising order."""

    pairs: I64
    below: I64

    @classmethod
    def of(cls, table: HistogramTable) -> History:
        """As the executor sends them."""
        pairs = _pairs(table.tenant, table.endpoint)
        order = np.argsort(pairs, kind="stable")
        counts = table.counts.reshape(-1, HISTOGRAM_BUCKETS)[order]
        below = np.zeros((len(pairs), HISTOGRAM_BUCKETS + 1), np.int64)
        np.cumsum(counts, axis=1, out=below[:, 1:])
        return cls(pairs[order], below)

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
        below = self.below[np.maximum(rows, 0)]
        total = below[:, -1]
        bucket = np.clip(-(-np.maximum(answered, 0) // BUCKET), 0, HISTOGRAM_BUCKETS - 1)
        at, after = _at(below, bucket), _at(below, bucket + 1)
        gone = np.where(bucket > 0, at + (after - at) * (answered - BUCKET * (bucket - 1)) // BUCKET, after)
        gone = np.where(answered < 0, 0, np.minimum(gone, total))
        known = (rows >= 0) & (total > gone)
        found = []
        for percent in percents:
            target = 100 * gone + percent * (total - gone)
            bucket = np.minimum((100 * below[:, 1:] < target[:, None]).sum(axis=1), HISTOGRAM_BUCKETS - 1)
            at, after = _at(below, bucket), _at(below, bucket + 1)
            into = BUCKET * (target - 100 * at) // np.maximum(100 * (after - at), 1)
            logs = np.maximum(np.where(bucket > 0, BUCKET * (bucket - 1) + into, 0), answered)
            found.append(np.where(known, logs, UNKNOWN))
        return found


def _at(below: I64, bucket: I64) -> I64:
    picked: I64 = np.take_along_axis(below, bucket[:, None], axis=1)[:, 0]
    return picked


def _pairs(tenants: U32, endpoints: U32) -> I64:
    return tenants.astype(np.int64) << 32 | endpoints
