"""What each tenant may have here: weight, quotas and the highest priority that it may ask for."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

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
