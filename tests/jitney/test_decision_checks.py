"""What no scheduler may tell an executor is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jitney.columns import AdmitColumns, PolicyColumnUpdates, PreemptColumns, RunColumns, SubstituteColumns
from jitney.decision import Decision, PreemptionMode
from jitney.decision_checks import check
from jitney.errors import InvalidRequest
from jitney.snapshot import HorizonKind, PolicyMemory, Settings

SETTINGS = Settings(max_step_tokens=64, horizon_steps=4)


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


def counts(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def preempt(*requests: int, mode: int = PreemptionMode.RECOMPUTE) -> PreemptColumns:
    costs = np.zeros(len(requests), np.int64)
    modes = np.full(len(requests), mode, np.uint8)
    return PreemptColumns(ids(*requests), modes, costs, costs, ids(*[0] * len(requests)))


GOOD = Decision(
    run=RunColumns(ids(1, 2), counts(1, 40)),
    admit=AdmitColumns(ids(4, 5), counts(0, 23), counts(0, 2), counts(0, 2)),
    preempt=preempt(3),
    substitutes=SubstituteColumns(ids(6), counts(9), counts(1), counts(0)),
    coast_victims=ids(2, 1),
    horizon_steps=4,
)


def test_what_can_be_passes() -> None:
    check(Decision(), SETTINGS)
    check(GOOD, SETTINGS)
    check(replace(GOOD, horizon_kind=HorizonKind.UNTIL_EVENT, horizon_steps=1000), SETTINGS)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"run": RunColumns(ids(1, 2))}, "run.tokens", "0"),
        ({"run": RunColumns(ids(1, 1), counts(1, 1))}, "run.id", "1"),
        ({"run": RunColumns(ids(1), counts(0))}, "run.tokens", "0"),
        ({"run": RunColumns(ids(1, 2), counts(2**31 - 1, 2**31 - 1))}, "run.tokens and admit.tokens", f"{2**32 + 21}"),
        ({"admit": AdmitColumns(ids(4), counts(1))}, "admit.blocks", "0"),
        ({"admit": AdmitColumns(ids(4, 4), counts(1, 1), counts(1, 1), counts(0, 0))}, "admit.id", "4"),
        ({"admit": AdmitColumns(ids(4), counts(-1), counts(1), counts(0))}, "admit.tokens", "-1"),
        ({"admit": AdmitColumns(ids(4), counts(1), counts(-1), counts(0))}, "admit.blocks", "-1"),
        ({"admit": AdmitColumns(ids(4), counts(1), counts(1))}, "admit.load_blocks", "0"),
        ({"admit": AdmitColumns(ids(4), counts(1), counts(1), counts(-1))}, "admit.load_blocks", "-1"),
        ({"admit": AdmitColumns(ids(4), counts(1), counts(1), counts(2))}, "admit.load_blocks", "2"),
        ({"substitutes": SubstituteColumns(ids(6), counts(1), counts(1), counts(2))}, "substitutes.load_blocks", "2"),
        ({"preempt": PreemptColumns(ids(3))}, "preempt.mode", "0"),
        ({"preempt": preempt(3, 3)}, "preempt.id", "3"),
        ({"preempt": preempt(3, mode=99)}, "preempt.mode", "99"),
        ({"preempt": preempt(3, mode=0)}, "preempt.mode", "0"),
        ({"substitutes": SubstituteColumns(ids(6), counts(-2), counts(0), counts(0))}, "substitutes.tokens", "-2"),
        ({"policy_updates": PolicyColumnUpdates(ids(1))}, "policy_updates.a", "0"),
        ({"coast_victims": ids(1, 2, 1)}, "coast_victims", "1"),
        ({"next_candidates": ids(*range(1, 66))}, "next_candidates", "65"),
        ({"horizon_kind": HorizonKind.UNSPECIFIED}, "horizon_kind", "UNSPECIFIED"),
        ({"horizon_steps": 5}, "horizon_steps", "5"),
        ({"horizon_steps": -1}, "horizon_steps", "-1"),
        ({"chunk_cap_tokens": -1}, "chunk_cap_tokens", "-1"),
        ({"memory": PolicyMemory("fair", 1, bytes(65_537))}, "memory.content", "65537"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(replace(GOOD, **changes), SETTINGS)
    assert (refused.value.field, refused.value.value) == (field, value)
    assert refused.value.limit
