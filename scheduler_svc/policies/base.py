"""What a policy is: a ranking of the running rows and of the waiting requests.

Everything else (budgets, blocks, chunks, who gives way at what cost) is common to all policies. A policy has no state:
what it must remember travels in the snapshot, as bytes of its own and as two columns of each request that has run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64, PolicyColumnUpdates, RunningTable, WaitingTable
from jitney.decision import Refusal
from jitney.snapshot import PolicyChoice, Snapshot

Key = NDArray[np.signedinteger[Any]] | NDArray[np.unsignedinteger[Any]]
"""One integer for each row of a table; the smaller comes first."""
COMMON_WAITING_COLUMNS = ("tokens", "new_tokens", "preemptions", "tenant")
"""Columns of the waiting table that every decision reads, beside id: 21 bytes a row."""

OPTIONAL_TABLES = ("histograms", "tenants")
"""Tables of the snapshot that large executors send only to policies that read them."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A whole number that the operator may set."""

    name: str
    summary: str
    minimum: int
    maximum: int
    default: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """Keys of each running row [R] and of each waiting request [W]: integers, smaller first, the most significant
    key first; what they leave equal is ordered by id, which rises with arrival.

    Where classes are given they come before all keys, and a waiting request takes the place of a running row of a
    higher class (cheapest first, among those of the highest class) when rows or blocks are short.
    """

    running: tuple[Key, ...] = ()
    waiting: tuple[Key, ...] = ()
    running_class: I64 | None = None
    waiting_class: I64 | None = None
    wake_at_us: int = 0  # when the ranking changes by itself; 0: never
    memory: bytes = b""  # what the policy is given next time
    updates: PolicyColumnUpdates = field(default_factory=PolicyColumnUpdates)
    refusals: tuple[Refusal, ...] = ()  # of waiting requests


class Policy(ABC):
    """Ranks by integers alone, so that equal snapshots give equal orders on any machine."""

    name: ClassVar[str]
    summary: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    waiting_columns: ClassVar[tuple[str, ...]] = ()
    """What it reads of the waiting table beside id and the common columns; at most 40 bytes a row in all."""
    tables: ClassVar[tuple[str, ...]] = OPTIONAL_TABLES
    """Of OPTIONAL_TABLES, those that it reads; the executor may leave out the others, but for tenants with a quota."""
    reads_lengths: ClassVar[tuple[str, ...]] = ()
    """Tables ("running", "waiting") in which it reads predicted lengths: there it is shown blended ones (see
    `scheduler_svc.lengths`), elsewhere those of the executor."""
    memory_version: ClassVar[int] = 1
    """Of the bytes that it remembers: of another version, they count as absent."""

    def __init__(self, choice: PolicyChoice | None = None) -> None:
        """Takes the parameters of a choice that `PolicyBook.choose` has found in order."""
        self._values = {parameter.name: parameter.default for parameter in self.parameters}
        self._values |= dict(choice.parameters) if choice is not None else {}

    def value(self, name: str) -> int:
        """Of a parameter: as the operator set it, or its default."""
        return self._values[name]

    @abstractmethod
    def rank(self, snapshot: Snapshot, memory: bytes) -> Ranking:
        """Ranks all; `memory` is what the last ranking returned, empty at first."""

    def says(self, snapshot: Snapshot, table: RunningTable | WaitingTable, row: int, ranking: Ranking) -> str:
        """Of a row of the snapshot's running or waiting `table`, why it stands where it does, in a few words."""
        arrivals = table.arrival_us
        return f"it arrived {(snapshot.now_us - int(arrivals[row])) // 1000} ms ago" if len(arrivals) else ""


def policy_columns(snapshot: Snapshot) -> tuple[I64, I64]:
    """The policy's own columns a and b of all waiting requests [W]; 0 for those that have not run."""
    table, rows = snapshot.waiting_policy, snapshot.waiting.rows
    a, b = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    place = table.policy_row
    a[place], b[place] = table.policy_a, table.policy_b
    return a, b
