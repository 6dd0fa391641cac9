"""From a policy's ranking to orders: of all running rows, and of the first waiting requests.

What a row waits for comes before it: a row that computes a prefix takes the class of the most urgent request that
joined it, or would join it, and stands no later in the order (priority inheritance).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jitney.columns import I64, U64
from jitney.snapshot import Snapshot
from scheduler_svc.lookups import rows_with
from scheduler_svc.policies.base import Key, Ranking
from scheduler_svc.running import Flags

MAX_CHAIN = 4
"""A prefix that waits for a prefix that waits ... is followed so far."""


def running_order(snapshot: Snapshot, ranking: Ranking) -> tuple[I64, I64]:
    """Rows of the running table [R], the most important first, and the class of each row of the table [R]."""
    table = snapshot.running
    if table.rows == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    dependents, owners = _joined(snapshot)
    classes = _inherited(snapshot, ranking, dependents, owners)
    order = np.lexsort((table.id, *ranking.running[::-1], classes))
    if len(owners) == 0:
        return order, classes
    place = np.empty(table.rows, np.int64)
    place[order] = np.arange(table.rows) * 2
    for _ in range(MAX_CHAIN):
        np.minimum.at(place, owners, place[dependents] - 1)
    return np.argsort(place, kind="stable"), classes


def first_waiting(snapshot: Snapshot, ranking: Ranking, count: int, among: Flags | None = None) -> I64:
    """The first `count` rows of the waiting table, or all if there are fewer; of those in `among` [W], if given."""
    keys, ids = ranking.waiting, snapshot.waiting.id
    if ranking.waiting_class is not None:
        keys = (ranking.waiting_class, *keys)
    if among is None:
        return smallest(keys, ids, count)
    rows = np.flatnonzero(among)
    return rows[smallest(tuple(key[rows] for key in keys), ids[rows], count)]


def smallest(keys: tuple[Key, ...], ids: U64, count: int) -> I64:
    """Rows of the `count` smallest (keys, id), in that order; `ids` are distinct.

    The k-th value is looked for first and only what is not above it is sorted: the order in which a partition leaves
    its elements differs between machines, its k-th value does not.
    """
    if count <= 0:
        return np.empty(0, np.int64)
    if count >= len(ids):
        return np.lexsort((ids, *keys[::-1]))
    if not keys:
        return np.argsort(ids)[:count]  # distinct: no ties
    key = keys[0]
    if np.count_nonzero(key[1:] < key[:-1]) == 0:
        kth = key[count - 1]
        low, high = np.searchsorted(key, kth, "left"), np.searchsorted(key, kth, "right")
        below, ties = np.arange(low), np.arange(low, high)
    else:
        kth = _kth(key, count)
        below, ties = (key < kth).nonzero()[0], (key == kth).nonzero()[0]
    room = count - len(below)
    if room < len(ties):
        ties = ties[smallest(tuple(other[ties] for other in keys[1:]), ids[ties], room)]
    rows = np.concatenate((below, ties))
    return rows[np.lexsort((ids[rows], *(other[rows] for other in keys[::-1])))]


def _kth(key: Key, count: int) -> Any:
    """The `count`-th smallest value. Of many, those above the `count`-th smallest of the minima of so many columns are
    left out first: at least `count` values are not."""
    folds = min(len(key) // (4 * count), 32)
    if folds > 1:
        columns = len(key) // folds
        least = key[: folds * columns].reshape(folds, columns).min(axis=0)
        key = key[key <= np.partition(least, count - 1)[count - 1]]
    return np.partition(key, count - 1)[count - 1]


def _joined(snapshot: Snapshot) -> tuple[I64, I64]:
    """Rows that wait for a prefix, and the row that computes it, for each that is known."""
    table = snapshot.running
    dependents = table.waits_for.nonzero()[0]
    if len(dependents) == 0:
        return dependents, dependents
    owners = rows_with(table.id, table.waits_for[dependents])
    return dependents[owners >= 0], owners[owners >= 0]


def _inherited(snapshot: Snapshot, ranking: Ranking, dependents: I64, owners: I64) -> I64:
    """The class of each running row [R], with what it inherits."""
    if ranking.running_class is None:
        return np.zeros(snapshot.running.rows, np.int64)
    classes: I64 = ranking.running_class.astype(np.int64)
    table = snapshot.candidates
    joins = np.flatnonzero(table.pending_blocks > 0)
    if len(joins) and ranking.waiting_class is not None:
        rows = rows_with(snapshot.running.id, table.pending_owner[joins])
        asks = rows_with(snapshot.waiting.id, table.id[joins])
        known = (rows >= 0) & (asks >= 0)
        np.minimum.at(classes, rows[known], ranking.waiting_class[asks[known]])
    for _ in range(MAX_CHAIN if len(owners) else 0):
        np.minimum.at(classes, owners, classes[dependents])
    return classes
