"""What a policy is: an order of the running rows and of the waiting requests, most important first.

Everything else (budgets, blocks, chunks, who gives way at what cost) is common to all policies. A policy has no state:
what it must remember travels in the snapshot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jitney.columns import I64, U64
from jitney.snapshot import Snapshot

COMMON_WAITING_COLUMNS = ("tokens", "new_tokens", "preemptions")
"""Columns of the waiting table that every decision reads, beside id."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A whole number that the operator may set."""

    name: str
    summary: str
    minimum: int
    maximum: int
    default: int


class Policy(ABC):
    """Orders by integers alone, ties by (arrival, id), so that equal snapshots give equal orders on any machine."""

    name: ClassVar[str]
    summary: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    waiting_columns: ClassVar[tuple[str, ...]] = ()
    """What it reads of the waiting table beside id and the common columns; at most 40 bytes a row in all."""

    @abstractmethod
    def order_running(self, snapshot: Snapshot) -> I64:
        """All rows of the running table [R]; the last ones are the first to give way."""

    @abstractmethod
    def first_waiting(self, snapshot: Snapshot, count: int) -> I64:
        """The first `count` rows of the waiting table, or all if there are fewer."""


def smallest(key: I64, ids: U64, count: int) -> I64:
    """Rows of the `count` smallest (key, id), in that order; `ids` are distinct.

    The k-th value is looked for first and only what is not above it is sorted: the order in which a partition leaves
    its elements differs between machines, its k-th value does not.
    """
    if count >= len(key):
        return np.lexsort((ids, key))
    if count <= 0:
        return np.empty(0, np.int64)
    if bool((key[1:] >= key[:-1]).all()):
        kth = key[count - 1]
        low, high = np.searchsorted(key, kth, "left"), np.searchsorted(key, kth, "right")
        below, ties = np.arange(low), np.arange(low, high)
    else:
        kth = np.partition(key, count - 1)[count - 1]
        below, ties = np.flatnonzero(key < kth), np.flatnonzero(key == kth)
    room = count - len(below)
    if room < len(ties):
        ties = ties[ids[ties] <= np.partition(ids[ties], room - 1)[room - 1]]
    rows = np.concatenate((below, ties))
    return rows[np.lexsort((ids[rows], key[rows]))]
