"""Whether a decision can be one: what no scheduler may tell an executor, refused with field, limit and value.

Runs on the executor, in front of everything that obeys a decision that came over a wire. It judges the decision by
itself; which of its requests there still are is asked when it is applied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitney.columns import AdmitColumns, SubstituteColumns, Table
from jitney.decision import Decision, PreemptionMode
from jitney.errors import InvalidRequest
from jitney.snapshot import MAX_CANDIDATES, MAX_POLICY_MEMORY_BYTES, HorizonKind, Settings

_TABLES = ("run", "admit", "preempt", "prefetch", "substitutes", "policy_updates")
_LEAST_TOKENS = {"run": 1, "admit": 0, "substitutes": 0}
_MODES = (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP_SSD)


def check(decision: Decision, settings: Settings) -> None:
    """Raises InvalidRequest for the first thing that cannot be; `settings` are those of the snapshot."""
    for name in _TABLES:
        _check_whole(getattr(decision, name), name)
    for name in ("next_candidates", "coast_victims", "padding_rows"):
        _check_distinct(getattr(decision, name), name)
    for name, least in _LEAST_TOKENS.items():
        _check_least(getattr(decision, name).tokens, f"{name}.tokens", least)
    for name in ("admit", "prefetch", "substitutes"):
        _check_least(getattr(decision, name).blocks, f"{name}.blocks", 0)
    for name in ("admit", "substitutes"):
        _check_loads(getattr(decision, name), name)
    mode = decision.preempt.mode
    if len(mode) and not _MODES[0] <= int(mode.min()) <= int(mode.max()) <= _MODES[1]:
        outside = mode[(mode < _MODES[0]) | (mode > _MODES[1])]
        _refuse("preempt.mode", f"{_MODES[0]} to {_MODES[1]}", int(outside[0]))
    tokens = sum(int(t.tokens.sum(dtype=np.int64)) for t in (decision.run, decision.admit) if len(t.tokens))
    _between("run.tokens and admit.tokens", tokens, 0, settings.max_step_tokens)
    _check_scalars(decision, settings)


def _check_scalars(decision: Decision, settings: Settings) -> None:
    _between("next_candidates", len(decision.next_candidates), 0, MAX_CANDIDATES)
    if decision.horizon_kind is HorizonKind.UNSPECIFIED:
        _refuse("horizon_kind", "one of STEPS, UNTIL_EVENT", "UNSPECIFIED")
    if decision.horizon_kind is HorizonKind.STEPS:
        _between("horizon_steps", decision.horizon_steps, 1, max(1, settings.horizon_steps))
    if decision.chunk_cap_tokens < 0:
        _refuse("chunk_cap_tokens", "at least 0", decision.chunk_cap_tokens)
    _between("memory.content", len(decision.memory.content), 0, MAX_POLICY_MEMORY_BYTES)


def _check_whole(table: Table, field: str) -> None:
    """Each request once, and every column there."""
    columns = vars(table)
    sizes = [len(column) for column in columns.values()]
    if not any(sizes):
        return
    rows = sizes[0]
    for name, size in zip(columns, sizes, strict=True):
        if size != rows:
            _refuse(f"{field}.{name}", f"{rows} entries, one a request", size)
    _check_distinct(columns["id"], f"{field}.id")


def _check_distinct(ids: NDArray[Any], field: str) -> None:
    if len(ids) > 1 and np.count_nonzero(ids[1:] <= ids[:-1]):
        rising = np.sort(ids)
        twice = rising[1:] == rising[:-1]
        if np.count_nonzero(twice):
            _refuse(field, "each request once", int(rising[int(np.argmax(twice))]))


def _check_least(column: NDArray[Any], field: str, least: int) -> None:
    if len(column) and (low := int(column.min())) < least:
        _refuse(field, f"at least {least}", low)


def _check_loads(table: AdmitColumns | SubstituteColumns, field: str) -> None:
    """Blocks that are loaded are some of those that the request takes."""
    if not np.count_nonzero(table.load_blocks):
        return
    _check_least(table.load_blocks, f"{field}.load_blocks", 0)
    over = np.flatnonzero(table.load_blocks > table.blocks)
    if len(over):
        row = int(over[0])
        _refuse(f"{field}.load_blocks", f"at most {field}.blocks, {table.blocks[row]}", int(table.load_blocks[row]))


def _between(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        _refuse(field, f"{least} to {most}", value)


def _refuse(field: str, limit: str, value: object) -> None:
    raise InvalidRequest(f"{field} is {value}, allowed is {limit}", field=field, limit=limit, value=value)
