"""Numbers that no executor has, in any column that a policy reads: an answer, or INVALID_ARGUMENT, and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from jitney.errors import InvalidRequest
from jitney.snapshot import Rates, Snapshot
from jitney.snapshot_checks import check
from scheduler_svc.decide import decide
from scheduler_svc.memory import Memory
from tests.support.situations import random_snapshot, waiting

TABLES = ("running", "waiting", "tenants", "waiting_policy", "histograms", "candidates")


def spoilt(rand: random.Random, snapshot: Snapshot) -> Snapshot:
    """One number of it changed to an extreme one."""
    what = rand.choice([*TABLES, "rates", "memory", "now_us"])
    if what == "rates":
        return replace(snapshot, rates=Rates(*(rand.choice([0, 1, 10**9, 2**62, 2**63 - 1]) for _ in range(10))))
    if what == "now_us":
        return replace(snapshot, now_us=rand.choice([0, 2**62, 2**63 - 1]))
    if what == "memory":
        memory = Memory()
        memory.put(snapshot.policy.name, 1, rand.randbytes(rand.randint(0, 200)))
        return replace(snapshot, memory=memory.write(snapshot.policy.name))
    table = getattr(snapshot, what)
    columns = [(column.name, array) for column, array in table.columns() if len(array) and column.name != "id"]
    if not columns:
        return snapshot
    name, array = rand.choice(columns)
    array, limits = array.copy(), np.iinfo(array.dtype)
    array[rand.randrange(len(array))] = rand.choice([limits.min, limits.max, 0, limits.max // 2])
    return replace(snapshot, **{what: replace(table, **{name: array})})


def test_only_invalid_argument_comes_out() -> None:
    answered = refused = 0
    for seed in range(900):
        rand = random.Random(seed)
        snapshot = random_snapshot(rand, rand.randint(0, 6), rand.randint(0, 9), tiers=True)
        for _ in range(rand.randint(1, 4)):
            snapshot = spoilt(rand, snapshot)
        try:
            check(snapshot)
            decide(snapshot)
            answered += 1
        except InvalidRequest as error:
            assert error.field and error.message
            refused += 1
    assert answered > 100 and refused > 100


def test_columns_of_a_policy_for_a_row_that_is_not_there() -> None:
    snapshot = random_snapshot(random.Random(3), 0, 9, policy="mlfq")
    assert snapshot.waiting_policy.rows
    with pytest.raises(InvalidRequest) as error:
        decide(replace(snapshot, waiting=waiting({})))
    assert error.value.field == "waiting.policy_row" and error.value.limit == "0"
