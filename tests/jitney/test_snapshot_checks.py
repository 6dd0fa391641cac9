"""Numbers that no executor can have are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jitney.columns import CandidateTable, EndedTable, TenantTable
from jitney.errors import InvalidRequest
from jitney.snapshot import (
    Batching,
    Blocks,
    HorizonKind,
    LowerTiers,
    PolicyChoice,
    PolicyMemory,
    Rates,
    Settings,
    Snapshot,
    TierRoom,
)
from jitney.snapshot_checks import check
from tests.support.situations import candidates, ending, rows_of, running, waiting

GOOD = Snapshot(blocks=Blocks(100, 50, 20, 5, 10), running=running({}, {}), waiting=waiting({}, {}))


def test_what_can_be_passes() -> None:
    check(Snapshot())
    check(GOOD)
    check(replace(GOOD, waiting=waiting({"id": 300}, {"id": 200})))


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"settings": Settings(max_step_tokens=0)}, "settings.max_step_tokens", "0"),
        ({"settings": Settings(block_tokens=-1)}, "settings.block_tokens", "-1"),
        ({"settings": Settings(block_reserve=-2)}, "settings.block_reserve", "-2"),
        ({"settings": Settings(batching=Batching.UNSPECIFIED)}, "settings.batching", "UNSPECIFIED"),
        ({"settings": Settings(lower_tiers=LowerTiers.UNSPECIFIED)}, "settings.lower_tiers", "UNSPECIFIED"),
        ({"settings": Settings(horizon_kind=HorizonKind.UNSPECIFIED)}, "settings.horizon_kind", "UNSPECIFIED"),
        ({"blocks": Blocks(total=10, free=-1)}, "blocks.free", "-1"),
        ({"blocks": Blocks(total=10, free=5, evictable=4, granted=2)}, "blocks.total", "10"),
        ({"cpu": TierRoom(pin_blocks=-1)}, "cpu.pin_blocks", "-1"),
        ({"ssd": TierRoom(queue_us=-1)}, "ssd.queue_us", "-1"),
        ({"rates": Rates(block_bytes=-1)}, "rates.block_bytes", "-1"),
        ({"rates": Rates(step_base_ns=10**15 + 1)}, "rates.step_base_ns", str(10**15 + 1)),
        ({"now_us": -1}, "now_us", "-1"),
        ({"now_us": 2**63 - 1}, "now_us", str(2**63 - 1)),
        ({"ended_unlisted": -1}, "ended.unlisted", "-1"),
        ({"running": running({"prompt_tokens": 0, "computed_tokens": 0})}, "running.prompt_tokens", "0"),
        ({"running": running({"priority": 101})}, "running.priority", "101"),
        ({"running": running({"shared_blocks": 2})}, "running.shared_blocks", "2"),
        ({"running": running({"generated_tokens": 101})}, "running.generated_tokens", "101"),
        ({"running": running({"computed_tokens": 18})}, "running.computed_tokens", "18"),
        ({"running": running({"loading": 2})}, "running.loading", "2"),
        ({"running": running({}, {"id": 2, "waits_for": 2})}, "running.waits_for", "2"),
        ({"running": running({"id": 4}, {"id": 4})}, "running.id", "4"),
        ({"running": running({"id": 0})}, "running.id", "0"),
        ({"running": running({"predicted_p50": -2})}, "running.predicted_p50", "-2"),
        ({"waiting": waiting({"tokens": 0})}, "waiting.tokens", "0"),
        ({"waiting": waiting({"new_tokens": 0})}, "waiting.new_tokens", "0"),
        ({"waiting": waiting({"priority": -101})}, "waiting.priority", "-101"),
        ({"waiting": waiting({"id": 9}, {"id": 5}, {"id": 9})}, "waiting.id", "9"),
        ({"waiting": waiting({"id": 2})}, "waiting.id", "2"),
        ({"ending": ending({"id": 9, "held_blocks": -1})}, "ending.held_blocks", "-1"),
        ({"candidates": candidates({"id": 1, "device_hit_blocks": -1})}, "candidates.device_hit_blocks", "-1"),
        ({"candidates": candidates({"id": 1, "unheld_hit_blocks": 1})}, "candidates.unheld_hit_blocks", "1"),
        ({"candidates": candidates(*({"id": n} for n in range(65)))}, "candidates", "65"),
        ({"ended": rows_of(EndedTable, [{"id": n} for n in range(4097)])}, "ended", "4097"),
        ({"ended": EndedTable(id=np.array([3], np.uint64))}, "ended.tenant", "not sent"),
        ({"tenants": TenantTable(tenant=np.array([3], np.uint32))}, "tenants.weight", "not sent"),
        ({"candidates": CandidateTable(id=np.array([1], np.uint64))}, "candidates.device_hit_blocks", "not sent"),
        ({"memory": PolicyMemory("p", 1, b"x" * 65537)}, "memory.content", "65537"),
        ({"executor": "e" * 257}, "executor", "257"),
        ({"policy": PolicyChoice("fcfs", (("b", 1), ("a", 2)))}, "policy.parameters", "b, a"),
        ({"policy": PolicyChoice("fcfs", (("a", 1), ("a", 2)))}, "policy.parameters", "a, a"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check(replace(GOOD, **changes))
    assert (error.value.field, error.value.value) == (field, value)
    assert error.value.limit and field in error.value.message


def test_a_running_row_may_be_short_of_columns_that_are_not_sent() -> None:
    check(replace(GOOD, running=replace(GOOD.running, computed_tokens=np.empty(0, np.int32))))
