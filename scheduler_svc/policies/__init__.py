"""The policies, side by side: one file each, all on the one small base."""

from __future__ import annotations

from jitney.errors import InvalidRequest
from jitney.snapshot import PolicyChoice
from scheduler_svc.policies.base import Policy
from scheduler_svc.policies.fcfs import Fcfs

POLICIES: tuple[type[Policy], ...] = (Fcfs,)
"""Sorted by name."""


def choose(choice: PolicyChoice) -> Policy:
    """The policy of that name. InvalidRequest if this build does not have it, or for a parameter, a value of one or a
    table that it does not take."""
    kind = next((policy for policy in POLICIES if policy.name == choice.name), None)
    if kind is None:
        names = ", ".join(policy.name for policy in POLICIES)
        raise InvalidRequest(
            f"policy {choice.name!r} is unknown, there are: {names}",
            field="policy.name",
            limit=names,
            value=choice.name,
        )
    known = {parameter.name: parameter for parameter in kind.parameters}
    for name, value in choice.parameters:
        if name not in known:
            names = ", ".join(known) or "none"
            raise InvalidRequest(
                f"policy {kind.name} has no parameter {name!r}, there are: {names}",
                field=f"policy.parameters.{name}",
                limit=names,
                value=name,
            )
        low, high = known[name].minimum, known[name].maximum
        if not low <= value <= high:
            raise InvalidRequest(
                f"policy {kind.name}: {name} is {value}, allowed is {low} to {high}",
                field=f"policy.parameters.{name}",
                limit=f"{low} to {high}",
                value=value,
            )
    if choice.tables:
        raise InvalidRequest(
            f"policy {kind.name} reads no tables, got {choice.tables[0].name!r}",
            field="policy.tables",
            limit="none",
            value=choice.tables[0].name,
        )
    return kind()
