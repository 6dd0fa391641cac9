"""Orders, and what policies refuse."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from jitney.errors import InvalidRequest
from jitney.snapshot import PolicyChoice, PolicyTable, Snapshot
from scheduler_svc.decide import decide
from scheduler_svc.ordering import first_waiting, running_order, smallest
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.policies.base import COMMON_WAITING_COLUMNS, Ranking
from tests.support.situations import running, waiting


def test_smallest_is_a_prefix_of_the_sorted_rows() -> None:
    rand = random.Random(1)
    for _ in range(500):
        n, spread = rand.randint(0, rand.choice([40, 300])), rand.choice([1, 3, 100])
        keys = [rand.randint(-spread, spread) for _ in range(n)]
        keys = sorted(keys) if rand.random() < 0.5 else keys
        ids = rand.sample(range(1, 1000), n)
        for count in (0, 1, n // 2, n, n + 3):
            rows = smallest((np.array(keys, np.int64),), np.array(ids, np.uint64), count)
            assert rows.tolist() == sorted(range(n), key=lambda i: (keys[i], ids[i]))[:count]


def ranked(snapshot: Snapshot) -> Ranking:
    return BUILT_IN.choose(snapshot.policy).rank(snapshot, b"")


def test_fcfs_goes_by_arrival_then_id_and_ignores_priority() -> None:
    table = waiting(
        {"arrival_us": 5, "priority": 100}, {"arrival_us": 3}, {"arrival_us": 3, "id": 7}, {"arrival_us": 4}
    )
    order = first_waiting(Snapshot(waiting=table), ranked(Snapshot(waiting=table)), 3)
    assert table.id[order].tolist() == [7, 102, 104]
    rows = Snapshot(running=running({"arrival_us": 2}, {"arrival_us": 1, "priority": -100}))
    assert running_order(rows, ranked(rows))[0].tolist() == [1, 0]


def test_policies_are_listed_by_name_and_read_at_most_40_bytes_a_row() -> None:
    assert [policy.name for policy in BUILT_IN.kinds] == sorted({policy.name for policy in BUILT_IN.kinds})
    sizes = {column.name: column.dtype.itemsize for column, _ in waiting().columns()}
    for policy in BUILT_IN.kinds:
        assert sizes["id"] + sum(sizes[name] for name in COMMON_WAITING_COLUMNS + policy.waiting_columns) <= 40


@pytest.mark.parametrize(
    ("choice", "field", "value"),
    [
        (PolicyChoice("lottery"), "policy.name", "lottery"),
        (PolicyChoice("fcfs", (("quantum", 3),)), "policy.parameters.quantum", "quantum"),
        (PolicyChoice("fcfs", (), (PolicyTable("others", b"x" * 16),)), "policy.tables", "others"),
    ],
)
def test_unknown_policy_parameter_and_table(choice: PolicyChoice, field: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        decide(Snapshot(policy=choice))
    assert (error.value.field, error.value.value) == (field, value)
    assert error.value.limit and value in error.value.message


def test_a_column_that_is_needed_must_be_sent() -> None:
    empty = np.empty(0, np.int32)
    for table, name in (("running", "held_blocks"), ("waiting", "new_tokens"), ("waiting", "arrival_us")):
        whole = Snapshot(running=running({}), waiting=waiting({}))
        snapshot = replace(whole, **{table: replace(getattr(whole, table), **{name: empty})})
        with pytest.raises(InvalidRequest) as error:
            decide(snapshot)
        assert (error.value.field, error.value.limit, error.value.value) == (f"{table}.{name}", "1", "0")
