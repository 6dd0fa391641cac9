"""A policy in force in a simulation, with the waiting columns that it reads."""

from __future__ import annotations

from executor_svc.situation import Policy
from jitney.snapshot import PolicyChoice
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.policies.base import COMMON_WAITING_COLUMNS


def under(name: str, **parameters: int) -> Policy:
    """By name, with parameters that are not its defaults."""
    choice = PolicyChoice(name, tuple(sorted(parameters.items())))
    columns = BUILT_IN.choose(choice).waiting_columns
    return Policy(choice, waiting_columns=frozenset(("id", *COMMON_WAITING_COLUMNS, *columns)))
