"""Where ids and tenants stand in the tables of a snapshot."""

from __future__ import annotations

import numpy as np

from jitney.columns import I64, U32, U64

MAX_NUMBER = 1 << 21
"""Executors number their tenants densely; larger numbers are looked up by bisection."""


def tenant_rows(table: U32, wanted: U32) -> I64:
    """The row of `table` [T] that holds each of `wanted` [N]; T for those that it does not name."""
    count = len(table)
    if count == 0 or len(wanted) == 0:
        return np.full(len(wanted), count, np.int64)
    most = int(table.max())
    if most < MAX_NUMBER:
        places = np.full(most + 2, count, np.int64)
        places[table[::-1]] = np.arange(count - 1, -1, -1)
        return places[np.minimum(wanted, most + 1)]
    order = np.argsort(table, kind="stable")
    rows = order[np.minimum(np.searchsorted(table, wanted, sorter=order), count - 1)]
    return np.where(table[rows] == wanted, rows, count)


def rows_with(ids: U64, wanted: U64) -> I64:
    """The row of `ids`, which mostly rise with arrival, that holds each of `wanted`; -1 if none does."""
    if len(ids) == 0 or len(wanted) == 0:
        return np.full(len(wanted), -1, np.int64)
    order = None if bool((ids[1:] > ids[:-1]).all()) else np.argsort(ids)
    places = np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)
    rows = places if order is None else order[places]
    return np.where(ids[rows] == wanted, rows, -1)
