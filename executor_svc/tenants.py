"""What each tenant may have here: weight, quotas and the highest priority that it may ask for."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from executor_svc.names import Names
from jitney.columns import I32, I64, U32
from jitney.errors import InvalidRequest
from jitney.snapshot import PRIORITY_RANGE


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """`weight` in thousandths, for fair sharing; 0 means no quota."""

    weight: int = 1000
    max_rows: int = 0
    max_waiting_tokens: int = 0
    max_priority: int = PRIORITY_RANGE[1]


@dataclass(frozen=True, slots=True)
class Tenants:
    """Limits by tenant name; `default` for those that have none of their own. They hold within one executor."""

    named: Mapping[str, TenantLimits] = field(default_factory=dict)
    default: TenantLimits = field(default_factory=TenantLimits)

    def of(self, name: str) -> TenantLimits:
        """The limits of a tenant."""
        return self.named.get(name, self.default)


class LimitColumns:
    """Limits by tenant number, [capacity] each; a tenant's are looked up once."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self._known = 0
        self.weight: U32 = np.empty(64, np.uint32)
        self.max_rows: I32 = np.empty(64, np.int32)
        self.max_waiting_tokens: I64 = np.empty(64, np.int64)

    def reach(self, names: Names) -> None:
        """Has the limits of all tenants that have a number."""
        if len(names) > len(self.weight):
            capacity = max(len(names), 2 * len(self.weight))
            self.weight = np.resize(self.weight, capacity)
            self.max_rows = np.resize(self.max_rows, capacity)
            self.max_waiting_tokens = np.resize(self.max_waiting_tokens, capacity)
        for number in range(self._known, len(names)):
            limits = self.tenants.of(names.name(number))
            self.weight[number] = limits.weight
            self.max_rows[number] = limits.max_rows
            self.max_waiting_tokens[number] = limits.max_waiting_tokens
        self._known = len(names)


def read_tenants(path: Path) -> Tenants:
    """Limits from a TOML file: a table a tenant, `default` for the others; `weight` there is a number, 1 is normal.

    Raises InvalidRequest with the field, the limit and the value.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"the tenants of {path} cannot be read: {error}", field="tenants", value=path) from None
    named = {name: _limits(name, table) for name, table in tables.items()}
    return Tenants(named, named.pop("default", TenantLimits()))


_RANGES = {
    "weight": (1, 1_000_000),
    "max_rows": (0, 1 << 20),
    "max_waiting_tokens": (0, 1 << 40),
    "max_priority": PRIORITY_RANGE,
}


def _limits(name: str, table: object) -> TenantLimits:
    if not isinstance(table, dict):
        raise InvalidRequest(f"tenant {name} must be a table, got {table!r}", field=f"tenants.{name}", value=table)
    known = {field.name for field in fields(TenantLimits)}
    values: dict[str, int] = {}
    for key, value in table.items():
        where = f"tenants.{name}.{key}"
        if key not in known:
            raise InvalidRequest(
                f"{where} is not known, only {', '.join(sorted(known))} are",
                field=where,
                limit=sorted(known),
                value=key,
            )
        number = round(value * 1000) if key == "weight" and isinstance(value, (int, float)) else value
        least, most = _RANGES[key]
        if not isinstance(number, int) or isinstance(value, bool) or not least <= number <= most:
            scale = 1000 if key == "weight" else 1
            limit = f"{least / scale:g} to {most / scale:g}"
            raise InvalidRequest(f"{where} must be {limit}, got {value!r}", field=where, limit=limit, value=value)
        values[key] = number
    return TenantLimits(**values)
