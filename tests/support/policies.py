"""A policy in force in a simulation, with what it reads."""

from __future__ import annotations

from executor_svc.situation import Policy, Reads
from jitney.snapshot import PolicyChoice
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.policies.base import COMMON_WAITING_COLUMNS


def under(name: str, **parameters: int) -> Policy:
    """By name, with parameters that are not its defaults."""
    choice = PolicyChoice(name, tuple(sorted(parameters.items())))
    kind = BUILT_IN.choose(choice)
    columns = frozenset(("id", *COMMON_WAITING_COLUMNS, *kind.waiting_columns))
    return Policy(choice, reads=Reads(columns, frozenset(kind.tables)))
