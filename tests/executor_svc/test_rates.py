"""Rates learned from steps of a known cost."""

from __future__ import annotations

import random

from executor_svc.rates import MeasuredRates
from tests.support.step_plans import Chunk, Sequences

BASE_NS, ROW_NS, TOKEN_NS = 1_000_000, 50_000, 20_000


def observe(rates: MeasuredRates, prefill: int, decodes: int, rng: random.Random) -> None:
    """A step of so many decodes, and a chunk of a prompt."""
    chunks = [Chunk(row, [1], start=rng.randrange(200)) for row in range(decodes)]
    if prefill:
        chunks.append(Chunk(decodes, [1] * prefill))
    plan = Sequences(decodes + 1, 256).plan(chunks)
    cost_ns = BASE_NS + ROW_NS * plan.rows + TOKEN_NS * plan.tokens
    rates.observe(plan, int(cost_ns * rng.uniform(0.98, 1.02)) // 1000)


def test_what_a_prompt_costs_is_not_forgotten_while_nothing_but_decodes_runs() -> None:
    rates, rng = MeasuredRates(4096), random.Random(1)
    for _ in range(64):
        observe(rates, rng.randrange(1, 100), rng.randrange(1, 8), rng)
    for _ in range(640):
        observe(rates, 0, rng.randrange(1, 8), rng)
        found = rates.current()
        assert 0.8e9 / TOKEN_NS < found.prefill_tokens_per_s < 1.25e9 / TOKEN_NS, found
        assert 0.9 * BASE_NS < found.step_base_ns < 1.1 * BASE_NS, found
