"""Snapshots and decisions to and from the bytes of the wire.

A column travels as the packed little-endian bytes of its array; reading one copies nothing. Bytes that cannot be a
snapshot or a decision raise InvalidRequest with the field, the limit and the value; whether the numbers of a
well-formed snapshot are possible is `jitney.snapshot_checks`' part. Equal values give equal bytes.

The tables of a snapshot are put on the wire here and not by protobuf, which copies a large message four times (400 us
for 10,000 waiting requests, 30 here). The bytes are those that protobuf writes: fields by number, none empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import xxhash
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from jitney.columns import (
    U64,
    AdmitColumns,
    CandidateTable,
    Column,
    EndedTable,
    EndingTable,
    HistogramTable,
    PolicyColumnUpdates,
    PreemptColumns,
    PrefetchColumns,
    RunColumns,
    RunningTable,
    SubstituteColumns,
    Table,
    TenantTable,
    WaitingPolicyTable,
    WaitingTable,
    columns_of,
)
from jitney.decision import Decision, Refusal, RefusalReason, WaitReason
from jitney.errors import InvalidRequest
from jitney.scheduler.v1 import scheduler_pb2 as pb
from jitney.snapshot import (
    CONTRACT_VERSION,
    Batching,
    Blocks,
    HorizonKind,
    LowerTiers,
    PolicyChoice,
    PolicyMemory,
    PolicyTable,
    Rates,
    Settings,
    Snapshot,
    TierRoom,
)

SNAPSHOT_TABLES: Mapping[str, tuple[str, type[Table]]] = {
    "running": ("running", RunningTable),
    "ending": ("ending", EndingTable),
    "waiting": ("waiting", WaitingTable),
    "waiting_policy": ("waiting", WaitingPolicyTable),
    "candidates": ("candidates", CandidateTable),
    "ended": ("ended", EndedTable),
    "tenants": ("tenants", TenantTable),
    "histograms": ("histograms", HistogramTable),
}
"""Field of Snapshot -> (field of the message, table). Two tables share the message of the waiting ones."""

DECISION_TABLES: Mapping[str, type[Table]] = {
    "run": RunColumns,
    "admit": AdmitColumns,
    "preempt": PreemptColumns,
    "prefetch": PrefetchColumns,
    "substitutes": SubstituteColumns,
    "policy_updates": PolicyColumnUpdates,
}

_SCALARS: Mapping[type, tuple[str, ...]] = {
    kind: tuple(f.name for f in fields(kind)) for kind in (Settings, Blocks, TierRoom, Rates)
}
_COLUMNS: Mapping[type[Table], tuple[Column, ...]] = {
    table: columns_of(table) for table in (*(kind for _, kind in SNAPSHOT_TABLES.values()), *DECISION_TABLES.values())
}
_EMPTY: Mapping[type[Table], Table] = {table: table() for table in _COLUMNS}
_LAYOUT: Mapping[type[Table], tuple[tuple[str, np.dtype[Any], int, int], ...]] = {
    table: tuple((c.name, c.dtype, c.dtype.itemsize, c.width) for c in columns) for table, columns in _COLUMNS.items()
}
_ID = np.dtype("<u8")
_TABLE_FIELDS: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (target, tuple(field for field, (of, _) in SNAPSHOT_TABLES.items() if of == target))
    for target in dict.fromkeys(target for target, _ in SNAPSHOT_TABLES.values())
)

E = TypeVar("E", bound=IntEnum)
M = TypeVar("M", bound=Message)
T = TypeVar("T", bound=Table)
V = TypeVar("V", Settings, Blocks, TierRoom, Rates)


def digest_of(data: bytes) -> bytes:
    """xxh3-128 of a serialised snapshot, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The snapshot's bytes; `digest` is no part of them. TypeError for a column of another dtype than its own."""
    head = pb.Snapshot(
        contract_version=snapshot.contract_version,
        executor=snapshot.executor,
        incarnation=snapshot.incarnation,
        step=snapshot.step,
        attempt=snapshot.attempt,
        now_us=snapshot.now_us,
    )
    policy = snapshot.policy
    head.policy.name = policy.name
    for name, value in policy.parameters:
        head.policy.parameters.add(name=name, value=value)
    for table in policy.tables:
        head.policy.tables.add(name=table.name, digest=table.digest, content=table.content)
    for field in ("settings", "blocks", "cpu", "ssd", "rates"):
        _put_scalars(getattr(head, field), getattr(snapshot, field))
    parts: list[Any] = [head.SerializeToString(deterministic=True)]
    for target, columns in _COLUMNS_ON_WIRE:
        body: list[Any] = []  # bytes, and arrays, which `join` copies by itself
        size = 0
        for field, column, tag in columns:
            array = getattr(getattr(snapshot, field), column.name)
            if len(array):
                length = _varint(array.nbytes)
                body += (tag, length, _checked(column, array))
                size += len(tag) + len(length) + array.nbytes
        if target == "ended" and snapshot.ended_unlisted:
            body.append(pb.EndedTable(unlisted=snapshot.ended_unlisted).SerializeToString())
            size += len(body[-1])
        if body:
            parts += (_TABLE_TAG[target], _varint(size), *body)
    if snapshot.memory != PolicyMemory():
        tail = pb.Snapshot()
        _put_memory(tail.memory, snapshot.memory)
        parts.append(tail.SerializeToString(deterministic=True))
    return b"".join(parts)


def decode_snapshot(data: bytes) -> Snapshot:
    """The snapshot of `data`, with its digest. InvalidRequest for what is not one."""
    message = _parse(pb.Snapshot, data, "snapshot")
    if (version := message.contract_version) != CONTRACT_VERSION:
        text = f"contract_version is {version}, this build speaks {CONTRACT_VERSION}"
        raise InvalidRequest(text, field="contract_version", limit=CONTRACT_VERSION, value=version)
    tables: dict[str, Any] = {
        field: _get_table(message, kind, source) for field, (source, kind) in SNAPSHOT_TABLES.items()
    }
    policy = message.policy
    return Snapshot(
        executor=message.executor,
        incarnation=message.incarnation,
        step=message.step,
        attempt=message.attempt,
        now_us=message.now_us,
        policy=PolicyChoice(
            name=policy.name,
            parameters=tuple((p.name, p.value) for p in policy.parameters),
            tables=tuple(PolicyTable(t.name, t.digest, t.content) for t in policy.tables),
        ),
        settings=_get_settings(message.settings),
        blocks=_get_scalars(message.blocks, Blocks),
        cpu=_get_scalars(message.cpu, TierRoom),
        ssd=_get_scalars(message.ssd, TierRoom),
        rates=_get_scalars(message.rates, Rates),
        ended_unlisted=message.ended.unlisted,
        memory=_get_memory(message.memory),
        contract_version=message.contract_version,
        digest=digest_of(data),
        **tables,
    )


def with_attempt(data: bytes, attempt: int) -> bytes:
    """The same serialised snapshot, asked for the `attempt`-th time."""
    message = _parse(pb.Snapshot, data, "snapshot")
    message.attempt = attempt
    return message.SerializeToString(deterministic=True)


def with_tables(data: bytes, contents: Mapping[bytes, bytes]) -> bytes:
    """The same serialised snapshot with the content of its tables, by digest; without, of those not in `contents`."""
    message = _parse(pb.Snapshot, data, "snapshot")
    for table in message.policy.tables:
        table.content = contents.get(table.digest, b"")
    return message.SerializeToString(deterministic=True)


def encode_decision(decision: Decision) -> bytes:
    """The decision's bytes. TypeError for a column of another dtype than its own."""
    message = pb.Decision(
        incarnation=decision.incarnation,
        step=decision.step,
        attempt=decision.attempt,
        snapshot_digest=decision.snapshot_digest,
        build=decision.build,
        next_candidates=_ids(decision.next_candidates),
        coast_victims=_ids(decision.coast_victims),
        horizon_kind=pb.HorizonKind.Name(decision.horizon_kind),
        horizon_steps=decision.horizon_steps,
        wake_at_us=decision.wake_at_us,
        padding_rows=_ids(decision.padding_rows),
        chunk_cap_tokens=decision.chunk_cap_tokens,
        block_reserve=decision.block_reserve,
        needed_blocks=decision.needed_blocks,
        skipped_load_blocks=decision.skipped_load_blocks,
    )
    for field in DECISION_TABLES:
        _put_table(getattr(message, field), getattr(decision, field))
    for reason, count in decision.waiting_reasons:
        message.waiting_reasons.add(reason=pb.WaitReason.Name(reason), count=count)
    for refusal in decision.refusals:
        message.refusals.add(
            id=refusal.id,
            reason=pb.RefusalReason.Name(refusal.reason),
            limit=refusal.limit,
            value=refusal.value,
            retry_after_us=refusal.retry_after_us,
        )
    _put_memory(message.memory, decision.memory)
    return message.SerializeToString(deterministic=True)


def decode_decision(data: bytes) -> Decision:
    """The decision of `data`. InvalidRequest for what is not one."""
    message = _parse(pb.Decision, data, "decision")
    tables: dict[str, Any] = {field: _get_table(message, kind, field) for field, kind in DECISION_TABLES.items()}
    return Decision(
        incarnation=message.incarnation,
        step=message.step,
        attempt=message.attempt,
        snapshot_digest=message.snapshot_digest,
        build=message.build,
        next_candidates=_ids_of(message.next_candidates, "next_candidates"),
        coast_victims=_ids_of(message.coast_victims, "coast_victims"),
        horizon_kind=_enum(HorizonKind, message.horizon_kind, "horizon_kind"),
        horizon_steps=message.horizon_steps,
        wake_at_us=message.wake_at_us,
        waiting_reasons=tuple(
            (_enum(WaitReason, r.reason, "waiting_reasons.reason"), r.count) for r in message.waiting_reasons
        ),
        memory=_get_memory(message.memory),
        refusals=tuple(
            Refusal(r.id, _enum(RefusalReason, r.reason, "refusals.reason"), r.limit, r.value, r.retry_after_us)
            for r in message.refusals
        ),
        padding_rows=_ids_of(message.padding_rows, "padding_rows"),
        chunk_cap_tokens=message.chunk_cap_tokens,
        block_reserve=message.block_reserve,
        needed_blocks=message.needed_blocks,
        skipped_load_blocks=message.skipped_load_blocks,
        **tables,
    )


def _parse(kind: type[M], data: bytes, field: str) -> M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"{field}: {len(data)} bytes are no {kind.__name__}", field=field) from error
    return message


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(message: type[Message], field: str) -> int:
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return number


def _tag(number: int) -> bytes:
    """What stands before the length of a length-delimited field."""
    return _varint(number << 3 | 2)


_TABLE_TAG = {target: _tag(_number(pb.Snapshot, target)) for target, _ in _TABLE_FIELDS}
_COLUMNS_ON_WIRE = tuple(
    (
        target,
        tuple(
            (field, column, _tag(number))
            for number, field, column in sorted(
                (
                    (_number(getattr(pb, column.table), column.name), field, column)
                    for field in names
                    for column in _COLUMNS[SNAPSHOT_TABLES[field][1]]
                ),
                key=lambda found: found[0],
            )
        ),
    )
    for target, names in _TABLE_FIELDS
)
"""For each table of the wire, its columns by number: field of Snapshot, column, tag."""


def _checked(column: Column, array: NDArray[Any]) -> NDArray[Any]:
    if len(array) and array.dtype != column.dtype:
        raise TypeError(f"{column.table}.{column.name} is {array.dtype}, not {column.dtype}")
    return np.ascontiguousarray(array)


def _put_table(message: Any, table: Table) -> None:
    for column in _COLUMNS[type(table)]:
        setattr(message, column.name, _checked(column, getattr(table, column.name)).tobytes())


def _get_table(message: Any, kind: type[T], field: str) -> T:
    """The table in a field of the message; its arrays lie over the message's bytes."""
    empty = _EMPTY[kind]
    if not message.HasField(field):
        return empty  # type: ignore[return-value]
    message = getattr(message, field)
    arrays, rows = {}, -1
    for name, dtype, size, width in _LAYOUT[kind]:
        data = getattr(message, name)
        if rows < 0:
            rows = len(data) // size
        if not data:
            continue
        if len(data) != rows * width * size:
            raise _misfit(f"{field}.{name}", len(data), size, rows * width)
        arrays[name] = np.frombuffer(data, dtype)
    return empty.with_columns(arrays)  # type: ignore[return-value]


def _misfit(field: str, size: int, itemsize: int, entries: int) -> InvalidRequest:
    """A column that is not of so many entries."""
    if size % itemsize:
        text = f"{field} has {size} bytes, no multiple of {itemsize}"
        return InvalidRequest(text, field=field, limit=itemsize, value=size)
    text = f"{field} has {size // itemsize} entries, {entries} are needed"
    return InvalidRequest(text, field=field, limit=entries, value=size // itemsize)


def _ids_of(data: bytes, field: str) -> U64:
    if len(data) % _ID.itemsize:
        raise _misfit(field, len(data), _ID.itemsize, 0)
    return np.frombuffer(data, _ID)


def _ids(array: U64) -> bytes:
    if array.dtype != _ID:
        raise TypeError(f"ids are {array.dtype}, not {_ID}")
    return array.tobytes()


def _put_scalars(message: Any, value: Settings | Blocks | TierRoom | Rates) -> None:
    for name in _SCALARS[type(value)]:
        setattr(message, name, int(getattr(value, name)))


def _get_scalars(message: Any, kind: type[V]) -> V:
    return kind(*(getattr(message, name) for name in _SCALARS[kind]))


def _get_settings(message: pb.Settings) -> Settings:
    values = {name: getattr(message, name) for name in _SCALARS[Settings]}
    values["batching"] = _enum(Batching, message.batching, "settings.batching")
    values["horizon_kind"] = _enum(HorizonKind, message.horizon_kind, "settings.horizon_kind")
    values["lower_tiers"] = _enum(LowerTiers, message.lower_tiers, "settings.lower_tiers")
    return Settings(**values)


def _enum(kind: type[E], value: int, field: str) -> E:
    try:
        return kind(value)
    except ValueError as error:
        raise InvalidRequest(
            f"{field} {value} is unknown, the largest is {max(kind)}", field=field, limit=int(max(kind)), value=value
        ) from error


def _put_memory(message: pb.PolicyMemory, memory: PolicyMemory) -> None:
    if memory.policy or memory.version or memory.content:
        message.policy = memory.policy
        message.version = memory.version
        message.content = memory.content


def _get_memory(message: pb.PolicyMemory) -> PolicyMemory:
    return PolicyMemory(message.policy, message.version, message.content)
