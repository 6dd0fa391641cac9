"""What replay and shadow share: a policy as it is named on a command line, and tables that a log keeps by digest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jitney.errors import InvalidRequest
from jitney.snapshot import PolicyChoice, Snapshot
from scheduler_svc.policies import BUILT_IN, PolicyBook
from scheduler_svc.policies.custom import with_custom


def named(policy: str, parameters: Sequence[str]) -> tuple[PolicyChoice, PolicyBook]:
    """A policy, by its name or as path.py:ClassName, with `key=value` parameters, and the book that has it.

    InvalidRequest if it is in no book or takes no such parameters.
    """
    book = with_custom(policy) if ":" in policy else BUILT_IN
    own = [kind.name for kind in book.kinds if kind not in BUILT_IN.kinds]
    choice = choice_of(own[0] if own else policy, parameters)
    book.choose(choice)
    return choice, book


def choice_of(name: str, parameters: Sequence[str]) -> PolicyChoice:
    """A policy with `key=value` parameters. InvalidRequest for what is no whole number."""
    values: dict[str, int] = {}
    for text in parameters:
        key, _, value = text.partition("=")
        try:
            values[key] = int(value)
        except ValueError:
            raise InvalidRequest(
                f"a parameter must be NAME=INTEGER, not {text!r}", field=f"policy.parameters.{key}", value=text
            ) from None
    return PolicyChoice(name, tuple(sorted(values.items())))


def with_tables(snapshot: Snapshot, tables: Mapping[bytes, bytes]) -> Snapshot:
    """The snapshot with the content of the tables that it only names."""
    if all(table.content for table in snapshot.policy.tables):
        return snapshot
    filled = tuple(replace(t, content=t.content or tables.get(t.digest, b"")) for t in snapshot.policy.tables)
    return replace(snapshot, policy=replace(snapshot.policy, tables=filled))
