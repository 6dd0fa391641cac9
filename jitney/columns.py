"""The columns of a snapshot and of a decision: one registry of name, dtype, unit, writer and unknown value.

A table is a frozen data class whose fields are numpy arrays of equal length, one entry per row. An empty array in a
table that has rows means "not sent". The protos hold the same names; a test compares the two. This module loads
without gRPC, so that pure cores can use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

HISTOGRAM_BUCKETS = 32
"""Bucket i of a length histogram counts lengths of at most 2^(i/2) tokens (and more than bucket i-1's bound)."""


@dataclass(frozen=True, slots=True)
class Column:
    """What one column is: `width` entries of `dtype` a row, in `unit`; `unknown` stands for "not known"."""

    table: str
    name: str
    dtype: np.dtype[Any]
    unit: str
    writer: str
    unknown: int | None
    width: int


def _column(dtype: str, unit: str, *, unknown: int | None = None, writer: str = "executor", width: int = 1) -> Any:
    kind = np.dtype(dtype).newbyteorder("<")
    empty = np.empty(0, kind)
    empty.flags.writeable = False
    return field(
        default_factory=lambda: empty,
        metadata={"dtype": kind, "unit": unit, "unknown": unknown, "writer": writer, "width": width},
    )


@dataclass(frozen=True)
class Table:
    """Base of all tables: the first field names the rows."""

    name: ClassVar[str] = ""

    @property
    def rows(self) -> int:
        """Number of rows: the length of the first column."""
        first: NDArray[Any] = next(iter(vars(self).values()))  # ten times faster than by way of `fields`
        return len(first)

    def columns(self) -> Iterator[tuple[Column, NDArray[Any]]]:
        """Each column's description with its array."""
        for column in columns_of(type(self)):
            yield column, getattr(self, column.name)

    def with_columns(self, columns: Mapping[str, NDArray[Any]]) -> Self:
        """The same table with other arrays in these columns; in a quarter of the time that `__init__` takes."""
        table = object.__new__(type(self))
        vars(table).update({**vars(self), **columns})
        return table

    def take(self, index: NDArray[Any]) -> Self:
        """The rows of `index` (integer or boolean), in that order; columns not sent stay so."""
        picked = {}
        for column, array in self.columns():
            if len(array) == 0:
                picked[column.name] = array
            elif column.width == 1:
                picked[column.name] = array[index]
            else:
                picked[column.name] = array.reshape(-1, column.width)[index].reshape(-1)
        return type(self)(**picked)


def columns_of(table: type[Table]) -> tuple[Column, ...]:
    """The columns of a table type, in order."""
    return tuple(
        Column(
            table=table.name,
            name=f.name,
            dtype=f.metadata["dtype"],
            unit=f.metadata["unit"],
            writer=f.metadata["writer"],
            unknown=f.metadata["unknown"],
            width=f.metadata["width"],
        )
        for f in fields(table)
    )


@dataclass(frozen=True)
class RunningTable(Table):
    """Requests that hold a row, in the order in which they were admitted."""

    name: ClassVar[str] = "RunningTable"

    id: U64 = _column("u8", "request")
    arrival_us: I64 = _column("i8", "us")
    priority: I32 = _column("i4", "-100..100")
    tenant: U32 = _column("u4", "number")
    endpoint: U32 = _column("u4", "number")
    prompt_tokens: I32 = _column("i4", "tokens")
    generated_tokens: I32 = _column("i4", "tokens")
    max_new_tokens: I32 = _column("i4", "tokens")
    computed_tokens: I32 = _column("i4", "tokens")
    in_flight_tokens: I32 = _column("i4", "tokens")
    held_blocks: I32 = _column("i4", "blocks")
    shared_blocks: I32 = _column("i4", "blocks")
    lower_blocks: I32 = _column("i4", "blocks")
    preemptions: I32 = _column("i4", "count")
    admitted_us: I64 = _column("i8", "us")
    waits_for: U64 = _column("u8", "request", unknown=0)
    ttft_deadline_us: I64 = _column("i8", "us", unknown=0)
    deadline_us: I64 = _column("i8", "us", unknown=0)
    predicted_p50: I32 = _column("i4", "tokens", unknown=-1)
    predicted_p90: I32 = _column("i4", "tokens", unknown=-1)
    policy_a: I64 = _column("i8", "policy", writer="scheduler")
    policy_b: I64 = _column("i8", "policy", writer="scheduler")
    loading: U8 = _column("u1", "flag")
    features: U64 = _column("u8", "packed counts, see jitney.features")


@dataclass(frozen=True)
class EndingTable(Table):
    """Rows that reach max_tokens in a launched step: not to be run again."""

    name: ClassVar[str] = "EndingTable"

    id: U64 = _column("u8", "request")
    held_blocks: I32 = _column("i4", "blocks")


@dataclass(frozen=True)
class WaitingTable(Table):
    """Requests without a row, new or preempted, in the order of arrival. A policy reads at most 40 bytes a row."""

    name: ClassVar[str] = "WaitingTable"

    id: U64 = _column("u8", "request")
    arrival_us: I64 = _column("i8", "us")
    tokens: I32 = _column("i4", "tokens")
    new_tokens: I32 = _column("i4", "tokens")
    priority: I8 = _column("i1", "-100..100")
    preemptions: U8 = _column("u1", "count")
    tenant: U32 = _column("u4", "number")
    endpoint: U16 = _column("u2", "number")
    predicted_p50: I32 = _column("i4", "tokens", unknown=-1)
    predicted_p90: I32 = _column("i4", "tokens", unknown=-1)
    ttft_deadline_us: I64 = _column("i8", "us", unknown=0)
    deadline_us: I64 = _column("i8", "us", unknown=0)
    generated_tokens: I32 = _column("i4", "tokens")
    features: U64 = _column("u8", "packed counts, see jitney.features")


@dataclass(frozen=True)
class WaitingPolicyTable(Table):
    """The policy's own columns of those waiting requests that have run; `policy_row` indexes WaitingTable."""

    name: ClassVar[str] = "WaitingTable"

    policy_row: U32 = _column("u4", "row")
    policy_a: I64 = _column("i8", "policy", writer="scheduler")
    policy_b: I64 = _column("i8", "policy", writer="scheduler")


@dataclass(frozen=True)
class CandidateTable(Table):
    """At most 64 waiting requests that were looked up in the cache."""

    name: ClassVar[str] = "CandidateTable"

    id: U64 = _column("u8", "request")
    device_hit_blocks: I32 = _column("i4", "blocks", writer="cache")
    unheld_hit_blocks: I32 = _column("i4", "blocks", writer="cache")
    cpu_hit_blocks: I32 = _column("i4", "blocks", writer="cache")
    ssd_hit_blocks: I32 = _column("i4", "blocks", writer="cache")
    pending_blocks: I32 = _column("i4", "blocks", writer="cache")
    pending_owner: U64 = _column("u8", "request", unknown=0, writer="cache")
    lookup_step: U64 = _column("u8", "step")
    features: U64 = _column("u8", "packed counts, see jitney.features")


@dataclass(frozen=True)
class EndedTable(Table):
    """Requests that ended since the last answered snapshot."""

    name: ClassVar[str] = "EndedTable"

    id: U64 = _column("u8", "request")
    tenant: U32 = _column("u4", "number")
    endpoint: U32 = _column("u4", "number")
    prompt_tokens: I32 = _column("i4", "tokens")
    generated_tokens: I32 = _column("i4", "tokens")
    predicted_p50: I32 = _column("i4", "tokens", unknown=-1)
    outcome: U8 = _column("u1", "Outcome", unknown=0)
    features: U64 = _column("u8", "packed counts, see jitney.features")


@dataclass(frozen=True)
class TenantTable(Table):
    """Tenants that have a request here, with what each was served."""

    name: ClassVar[str] = "TenantTable"

    tenant: U32 = _column("u4", "number")
    weight: U32 = _column("u4", "thousandths")
    max_rows: I32 = _column("i4", "rows", unknown=0)
    max_waiting_tokens: I64 = _column("i8", "tokens", unknown=0)
    served_prompt_tokens: I64 = _column("i8", "tokens")
    served_cached_tokens: I64 = _column("i8", "tokens")
    served_generated_tokens: I64 = _column("i8", "tokens")
    held_bytes: I64 = _column("i8", "bytes")


@dataclass(frozen=True)
class HistogramTable(Table):
    """Decayed histograms of output length for (tenant, endpoint) pairs."""

    name: ClassVar[str] = "HistogramTable"

    tenant: U32 = _column("u4", "number")
    endpoint: U32 = _column("u4", "number")
    counts: U32 = _column("u4", "count", width=HISTOGRAM_BUCKETS)


@dataclass(frozen=True)
class RunColumns(Table):
    """Running rows that compute in the step."""

    name: ClassVar[str] = "RunColumns"

    id: U64 = _column("u8", "request", writer="scheduler")
    tokens: I32 = _column("i4", "tokens", writer="scheduler")


@dataclass(frozen=True)
class AdmitColumns(Table):
    """Waiting requests that get a row, in order."""

    name: ClassVar[str] = "AdmitColumns"

    id: U64 = _column("u8", "request", writer="scheduler")
    tokens: I32 = _column("i4", "tokens", writer="scheduler")
    blocks: I32 = _column("i4", "blocks", writer="scheduler")
    load_blocks: I32 = _column("i4", "blocks", writer="scheduler")


@dataclass(frozen=True)
class PreemptColumns(Table):
    """Running rows that lose their row, in order, with both costs."""

    name: ClassVar[str] = "PreemptColumns"

    id: U64 = _column("u8", "request", writer="scheduler")
    mode: U8 = _column("u1", "PreemptionMode", writer="scheduler")
    recompute_us: I64 = _column("i8", "us", writer="scheduler")
    move_us: I64 = _column("i8", "us", unknown=-1, writer="scheduler")
    for_id: U64 = _column("u8", "request", unknown=0, writer="scheduler")


@dataclass(frozen=True)
class PrefetchColumns(Table):
    """Waiting requests whose blocks are to be read from the SSD into the CPU tier: at most so many each."""

    name: ClassVar[str] = "PrefetchColumns"

    id: U64 = _column("u8", "request", writer="scheduler")
    blocks: I32 = _column("i4", "blocks", writer="scheduler")


@dataclass(frozen=True)
class SubstituteColumns(Table):
    """Waiting requests that may board when a row ends within the horizon, in order."""

    name: ClassVar[str] = "SubstituteColumns"

    id: U64 = _column("u8", "request", writer="scheduler")
    tokens: I32 = _column("i4", "tokens", writer="scheduler")
    blocks: I32 = _column("i4", "blocks", writer="scheduler")
    load_blocks: I32 = _column("i4", "blocks", writer="scheduler")


@dataclass(frozen=True)
class PolicyColumnUpdates(Table):
    """New values of the policy's own columns."""

    name: ClassVar[str] = "PolicyColumnUpdates"

    id: U64 = _column("u8", "request", writer="scheduler")
    a: I64 = _column("i8", "policy", writer="scheduler")
    b: I64 = _column("i8", "policy", writer="scheduler")


TABLES: tuple[type[Table], ...] = (
    RunningTable,
    EndingTable,
    WaitingTable,
    WaitingPolicyTable,
    CandidateTable,
    EndedTable,
    TenantTable,
    HistogramTable,
    RunColumns,
    AdmitColumns,
    PreemptColumns,
    PrefetchColumns,
    SubstituteColumns,
    PolicyColumnUpdates,
)

REGISTRY: tuple[Column, ...] = tuple(column for table in TABLES for column in columns_of(table))
"""Every column there is."""
