"""Whether a snapshot can be true: the numbers that no executor can have, each refused with field, limit and value.

Runs in front of every decision that came over a wire, so each check is one pass over one column at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitney.columns import RunningTable, Table, WaitingTable
from jitney.errors import InvalidRequest
from jitney.snapshot import (
    MAX_CANDIDATES,
    MAX_ENDED,
    MAX_POLICY_MEMORY_BYTES,
    PRIORITY_RANGE,
    Batching,
    HorizonKind,
    LowerTiers,
    Snapshot,
)

MAX_NAME_CHARS = 256
MAX_TIME_US = 1 << 61
"""On the executor's clock: sums of a few times stay inside of int64."""
MAX_RATE = 10**15

_LONG = 1024
"""Rows from which on a column is better checked by itself."""

_RUNNING_AT_LEAST = {
    "prompt_tokens": 1,
    "generated_tokens": 0,
    "max_new_tokens": 1,
    "computed_tokens": 0,
    "in_flight_tokens": 0,
    "held_blocks": 0,
    "shared_blocks": 0,
    "lower_blocks": 0,
    "preemptions": 0,
    "predicted_p50": -1,
    "predicted_p90": -1,
}
_WAITING_AT_LEAST = {"tokens": 1, "new_tokens": 1, "predicted_p50": -1, "predicted_p90": -1, "generated_tokens": 0}
_CANDIDATES_AT_LEAST = {
    "device_hit_blocks": 0,
    "unheld_hit_blocks": 0,
    "cpu_hit_blocks": 0,
    "ssd_hit_blocks": 0,
    "pending_blocks": 0,
}
_RUNNING_NOT_ABOVE = (
    ("shared_blocks", "held_blocks"),
    ("lower_blocks", "held_blocks"),
    ("generated_tokens", "max_new_tokens"),
)


def check(snapshot: Snapshot) -> None:
    """Raises InvalidRequest for the first thing that cannot be."""
    _check_scalars(snapshot)
    _check_sizes(snapshot)
    _check_ids(snapshot.running, snapshot.waiting)
    _check_rows(snapshot.running, "running", _RUNNING_AT_LEAST)
    _check_rows(snapshot.waiting, "waiting", _WAITING_AT_LEAST)
    _check_rows(snapshot.candidates, "candidates", _CANDIDATES_AT_LEAST)
    _check_rows(snapshot.ending, "ending", {"held_blocks": 0})
    _check_running(snapshot.running)
    for name in ("ending", "candidates", "ended", "tenants", "histograms"):
        _check_whole(getattr(snapshot, name), name)
    _not_above(snapshot.candidates, "candidates", "unheld_hit_blocks", "device_hit_blocks")


def _check_scalars(snapshot: Snapshot) -> None:
    settings, blocks, rates = snapshot.settings, snapshot.blocks, snapshot.rates
    for name in ("max_step_tokens", "max_rows", "block_tokens", "context_tokens", "chunk_cap_tokens", "horizon_steps"):
        _at_least(f"settings.{name}", getattr(settings, name), 1)
    for name in ("block_reserve", "max_preemptions", "target_tpot_us", "max_waiting_requests", "max_waiting_tokens"):
        _at_least(f"settings.{name}", getattr(settings, name), 0)
    if settings.batching is Batching.UNSPECIFIED:
        _refuse("settings.batching", "one of CONTINUOUS, STATIC_PADDED, STATIC_DROPPING", "UNSPECIFIED")
    if settings.horizon_kind is HorizonKind.UNSPECIFIED:
        _refuse("settings.horizon_kind", "one of STEPS, UNTIL_EVENT", "UNSPECIFIED")
    if settings.lower_tiers is LowerTiers.UNSPECIFIED:
        _refuse("settings.lower_tiers", "one of MEASURED, ALWAYS, NEVER", "UNSPECIFIED")
    for name in ("total", "free", "evictable", "leaving", "granted"):
        _at_least(f"blocks.{name}", getattr(blocks, name), 0)
    accounted = blocks.free + blocks.evictable + blocks.granted
    if accounted > blocks.total:
        _refuse("blocks.total", f"at least free + evictable + granted = {accounted}", blocks.total)
    for tier, room in (("cpu", snapshot.cpu), ("ssd", snapshot.ssd)):
        for name in ("free_blocks", "pin_blocks", "queue_us", "out_queue_us"):
            _at_least(f"{tier}.{name}", getattr(room, name), 0)
    for name in type(rates).__slots__:
        _at_least(f"rates.{name}", getattr(rates, name), 0)
        _at_most(f"rates.{name}", getattr(rates, name), MAX_RATE, "in its unit")
    _at_least("now_us", snapshot.now_us, 0)
    _at_most("now_us", snapshot.now_us, MAX_TIME_US, "us")
    _at_least("ended.unlisted", snapshot.ended_unlisted, 0)


def _check_sizes(snapshot: Snapshot) -> None:
    _at_most("candidates", snapshot.candidates.rows, MAX_CANDIDATES, "rows")
    _at_most("ended", snapshot.ended.rows, MAX_ENDED, "rows")
    _at_most("memory.content", len(snapshot.memory.content), MAX_POLICY_MEMORY_BYTES, "bytes")
    _at_most("executor", len(snapshot.executor), MAX_NAME_CHARS, "characters")
    _at_most("policy.name", len(snapshot.policy.name), MAX_NAME_CHARS, "characters")
    names = [name for name, _ in snapshot.policy.parameters]
    if names != sorted(set(names)):
        _refuse("policy.parameters", "sorted by name, each name once", ", ".join(names)[:MAX_NAME_CHARS])


def _check_whole(table: Table, field: str) -> None:
    """Every column was sent; only prompt signals may be lacking."""
    if table.rows:
        for name, column in vars(table).items():
            if not len(column) and name != "features":
                _refuse(f"{field}.{name}", f"the column of {table.rows} rows", "not sent")


def _check_rows(table: Table, field: str, least: dict[str, int]) -> None:
    if table.rows and not _all_at_least(table, least):
        for name, limit in least.items():
            column = getattr(table, name)
            if len(column) and (low := int(column.min())) < limit:
                _refuse(f"{field}.{name}", f"at least {limit}", low)
    priority = getattr(table, "priority", None)
    if priority is not None and len(priority):
        low, high = PRIORITY_RANGE
        for value in (int(priority.min()), int(priority.max())):
            if not low <= value <= high:
                _refuse(f"{field}.priority", f"{low} to {high}", value)


def _all_at_least(table: Table, least: dict[str, int]) -> bool:
    """Whether all of the columns that were sent keep their limits: of short columns in one comparison."""
    columns = [(column, limit) for name, limit in least.items() if len(column := getattr(table, name))]
    if table.rows > _LONG:
        return all(int(column.min()) >= limit for column, limit in columns)
    if not columns:
        return True
    stacked = np.concatenate([column for column, _ in columns]).reshape(len(columns), -1)
    limits = np.array([limit for _, limit in columns], np.int32)
    return not np.count_nonzero(stacked < limits[:, None])


def _check_running(running: RunningTable) -> None:
    for low, high in _RUNNING_NOT_ABOVE:
        _not_above(running, "running", low, high)
    sent = (running.prompt_tokens, running.generated_tokens, running.computed_tokens)
    if running.rows and all(len(column) for column in sent):
        known = running.prompt_tokens.astype(np.int64) + running.generated_tokens
        if np.count_nonzero(running.computed_tokens > known):
            row = int(np.argmax(running.computed_tokens - known))
            _refuse(
                "running.computed_tokens",
                f"at most prompt + generated = {int(known[row])}",
                int(running.computed_tokens[row]),
            )
    if len(running.loading) and int(running.loading.max()) > 1:
        _refuse("running.loading", "0 or 1", int(running.loading.max()))
    own = running.waits_for == running.id if len(running.waits_for) else None
    if own is not None and np.count_nonzero(own):
        _refuse("running.waits_for", "another request", int(running.id[int(np.argmax(own))]))


def _check_ids(running: RunningTable, waiting: WaitingTable) -> None:
    for field, table in (("running", running), ("waiting", waiting)):
        if table.rows and int(table.id.min()) == 0:
            _refuse(f"{field}.id", "at least 1", 0)
    run, wait = _distinct(running.id, "running.id"), _distinct(waiting.id, "waiting.id")
    if len(run) and len(wait) and run[-1] >= wait[0] and wait[-1] >= run[0]:
        places = np.minimum(np.searchsorted(wait, run), len(wait) - 1)
        both = wait[places] == run
        if np.count_nonzero(both):
            _refuse("waiting.id", "not in running too", int(run[int(np.argmax(both))]))


def _distinct(ids: NDArray[Any], field: str) -> NDArray[Any]:
    """The ids, rising; ids mostly rise with arrival, so that there is rarely anything to sort."""
    if len(ids) > 1 and np.count_nonzero(ids[1:] <= ids[:-1]):
        ids = np.sort(ids)
        twice = ids[1:] == ids[:-1]
        if np.count_nonzero(twice):
            _refuse(field, "each id once", int(ids[int(np.argmax(twice))]))
    return ids


def _not_above(table: Table, field: str, low: str, high: str) -> None:
    lower, upper = getattr(table, low), getattr(table, high)
    if len(lower) and len(upper) and np.count_nonzero(above := lower > upper):
        row = int(np.argmax(above))
        _refuse(f"{field}.{low}", f"at most {high} = {int(upper[row])}", int(lower[row]))


def _at_least(field: str, value: int, limit: int) -> None:
    if value < limit:
        _refuse(field, f"at least {limit}", value)


def _at_most(field: str, value: int, limit: int, unit: str) -> None:
    if value > limit:
        _refuse(field, f"at most {limit} {unit}", value)


def _refuse(field: str, limit: str, value: object) -> None:
    raise InvalidRequest(f"{field} is {value}, allowed is {limit}", field=field, limit=limit, value=value)
