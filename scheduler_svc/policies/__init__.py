"""The policies, side by side: one file each, all on the one small base."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from jitney.errors import InvalidRequest
from jitney.snapshot import PolicyChoice
from scheduler_svc.build import BUILD
from scheduler_svc.memory import LENGTHS
from scheduler_svc.policies.base import Parameter, Policy
from scheduler_svc.policies.deadline import Deadline
from scheduler_svc.policies.fair import Fair
from scheduler_svc.policies.fcfs import Fcfs
from scheduler_svc.policies.mlfq import Mlfq
from scheduler_svc.policies.priority import Priority
from scheduler_svc.policies.sjf import Sjf


@dataclass(frozen=True, slots=True)
class PolicyBook:
    """The policies that a scheduler knows, sorted by name, and the build that it decides as."""

    kinds: tuple[type[Policy], ...]
    build: str

    def choose(self, choice: PolicyChoice) -> Policy:
        """The policy of that name. InvalidRequest if it is not in the book, or for a parameter, a value of one or a
        table that it does not take."""
        kind = _kind_of(self.kinds, choice.name, choice.parameters)
        other = next((table.name for table in choice.tables if table.name != LENGTHS), None)
        if other is not None:
            raise InvalidRequest(
                f"there is no table {other!r}, decisions read {LENGTHS!r} only",
                field="policy.tables",
                limit=LENGTHS,
                value=other,
            )
        return kind(choice)


@lru_cache(maxsize=64)
def _kind_of(kinds: tuple[type[Policy], ...], name: str, parameters: tuple[tuple[str, int], ...]) -> type[Policy]:
    """The policy of that name, which takes these parameters."""
    kind = next((policy for policy in kinds if policy.name == name), None)
    if kind is None:
        names = ", ".join(policy.name for policy in kinds)
        raise InvalidRequest(
            f"policy {name!r} is unknown, there are: {names}", field="policy.name", limit=names, value=name
        )
    known = {parameter.name: parameter for parameter in kind.parameters}
    for parameter, value in parameters:
        _check(kind.name, known, parameter, value)
    return kind


def _check(policy: str, known: dict[str, Parameter], name: str, value: int) -> None:
    field = f"policy.parameters.{name}"
    if name not in known:
        names = ", ".join(known) or "none"
        raise InvalidRequest(
            f"policy {policy} has no parameter {name!r}, there are: {names}", field=field, limit=names, value=name
        )
    low, high = known[name].minimum, known[name].maximum
    if not low <= value <= high:
        raise InvalidRequest(
            f"policy {policy}: {name} is {value}, allowed is {low} to {high}",
            field=field,
            limit=f"{low} to {high}",
            value=value,
        )


BUILT_IN: Final = PolicyBook((Deadline, Fair, Fcfs, Mlfq, Priority, Sjf), BUILD)
"""All that this build brings along."""
