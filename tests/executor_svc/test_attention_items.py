"""What is remembered of a step's cut is what another cut would give."""

from __future__ import annotations

import numpy as np
import pytest

from executor_svc.attention_items import TILE_TOKENS, Cutter, Items, cut
from executor_svc.step_plan import SamplingRows, StepPlan


def step(queries: list[int], contexts: list[int]) -> StepPlan:
    """Rows with so many queries and tokens of context."""
    tokens = sum(queries)
    return StepPlan(
        step=0,
        token_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        write_slots=np.full(tokens, -1, np.int64),
        query_start=np.cumsum([0, *queries], dtype=np.int32),
        context_tokens=np.array(contexts, np.int32),
        block_table=np.zeros((len(queries), 1), np.int32),
        table_rows=np.arange(len(queries), dtype=np.int32),
        sample_rows=np.empty(0, np.int32),
        sampling=SamplingRows.greedy(0),
    )


def content(items: Items) -> tuple[object, ...]:
    """All but the order of the items, which is a guess of what takes longest."""
    return sorted(items.items.tolist()), items.merges.tolist(), items.slots, items.max_rows, items.max_total


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("queries", [[1], [1, 1, 1], [1, 40, 1], [0, 2]])
def test_remembered_cuts_are_right(threads: int, queries: list[int]) -> None:
    cutter, before = Cutter(), None
    for added in range(2 * TILE_TOKENS + 3):
        plan = step(queries, [60 + 70 * row + added for row in range(len(queries))])
        found = cutter.cut(plan, 3, 3, threads)
        assert content(found) == content(cut(plan, 3, 3, threads))
        before = before or found
    assert cutter.cut(step([1] * 9, [5] * 9), 3, 3, threads) is not before


def test_a_step_with_the_same_tiles_is_not_cut_again() -> None:
    cutter = Cutter()
    first = cutter.cut(step([1, 1], [TILE_TOKENS - 1, 3 * TILE_TOKENS + 1]), 3, 3, 2)
    assert cutter.cut(step([1, 1], [TILE_TOKENS, 4 * TILE_TOKENS]), 3, 3, 2) is first
    assert cutter.cut(step([1, 1], [TILE_TOKENS + 1, 4 * TILE_TOKENS]), 3, 3, 2) is not first
