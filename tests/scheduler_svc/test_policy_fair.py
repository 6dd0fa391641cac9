"""fair: against the algorithm as its paper tells it, and the paper's bound on the difference of services."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from jitney.columns import TenantTable
from jitney.decision import Decision
from jitney.snapshot import Blocks, PolicyChoice, PolicyMemory, Settings, Snapshot
from scheduler_svc.counters import MAX_TENANTS
from scheduler_svc.decide import decide
from scheduler_svc.policies.fair import Fair
from tests.support.decision_checks import check_decision
from tests.support.situations import rows_of, running, waiting
from tests.support.toy_executor import Toy, ToyExecutor


def tenants(*rows: dict[str, int]) -> TenantTable:
    table: TenantTable = rows_of(TenantTable, [{"weight": 1000} | row for row in rows])
    return table


def decided(**fields: Any) -> Decision:
    base = {"policy": PolicyChoice("fair"), "settings": Settings(max_rows=9, max_step_tokens=2000)}
    shown = Snapshot(**{"blocks": Blocks(99, 99), **base, **fields})
    decision = decide(shown)
    check_decision(shown, decision)
    return decision


def naive(requests: list[tuple[int, int, int]], counters: dict[int, float], weights: dict[int, int]) -> list[int]:
    """Algorithm 2: while there are requests, the first of the tenant with the smallest counter, which is charged."""
    queue, out = sorted(requests), []
    while queue:
        heads: dict[int, tuple[int, int, int]] = {}
        for request in queue:
            heads.setdefault(request[1], request)
        chosen = min(heads.values(), key=lambda r: (counters[r[1]], r[0]))
        counters[chosen[1]] += chosen[2] * 1000 // weights[chosen[1]]
        queue.remove(chosen)
        out.append(chosen[0])
    return out


def test_small_cases_board_as_the_paper_says() -> None:
    rand = random.Random(8)
    for _ in range(120):
        weights = {tenant: rand.choice([500, 1000, 2000]) for tenant in (1, 2, 3)}
        requests = [(101 + n, rand.randint(1, 3), rand.randint(1, 99)) for n in range(rand.randint(1, 6))]
        rows = [{"tenant": tenant, "tokens": tokens} for _, tenant, tokens in requests]
        table = tenants(*({"tenant": tenant, "weight": weight} for tenant, weight in weights.items()))
        decision = decided(tenants=table, waiting=waiting(*rows))
        assert decision.admit.id.tolist() == naive(requests, dict.fromkeys(weights, 0.0), weights)


def served(prompt: int, generated: int = 0, cached: int = 0) -> dict[str, int]:
    return {"served_prompt_tokens": prompt, "served_generated_tokens": generated, "served_cached_tokens": cached}


def first_of(memory: PolicyMemory, one: dict[str, int], two: dict[str, int], **parameters: int) -> int:
    """Which tenant's request stands first, given what each was served since."""
    choice = PolicyChoice("fair", tuple(sorted(parameters.items())))
    both = tenants({"tenant": 1} | one, {"tenant": 2} | two)
    line = waiting({"tenant": 1, "arrival_us": 0}, {"tenant": 2, "arrival_us": 1})
    decision = decided(policy=choice, memory=memory, tenants=both, waiting=line, settings=Settings(max_rows=1))
    return int(decision.admit.id[0]) - 100


def both_wait(*rows: dict[str, int], memory: PolicyMemory | None = None) -> PolicyMemory:
    line = waiting(*({"tenant": row["tenant"]} for row in rows))
    return decided(tenants=tenants(*rows), waiting=line, memory=memory or PolicyMemory()).memory


def test_counters_are_of_what_was_done() -> None:
    start = both_wait({"tenant": 1} | served(500, 80), {"tenant": 2} | served(0))  # what came before counts for nobody
    assert first_of(start, served(500, 80), served(0)) == 1
    assert first_of(start, served(601, 80), served(100)) == 2
    assert first_of(start, served(600, 80), served(0, 50)) == 1  # an output token costs two
    assert first_of(start, served(600, 80), served(0, 49)) == 2
    assert first_of(start, served(510, 80), served(0, cached=900)) == 2
    assert first_of(start, served(510, 80), served(0, cached=900), cached_cost=1) == 1
    heavier = both_wait({"tenant": 1, "weight": 2000} | served(700, 80), {"tenant": 2} | served(0), memory=start)
    for prompt, first in ((299, 2), (301, 1)):  # 200 before, and 200 more that count half
        assert first_of(heavier, served(900, 80) | {"weight": 2000}, served(prompt)) == first


def test_prompts_in_the_making_count_as_served() -> None:
    rows = running(
        {"tenant": 1, "prompt_tokens": 500, "computed_tokens": 100, "generated_tokens": 0, "held_blocks": 32}
    )
    line = waiting({"tenant": 1, "arrival_us": 0}, {"tenant": 2, "arrival_us": 1, "tokens": 300})
    base = {"running": rows, "waiting": line, "settings": Settings(max_rows=2), "blocks": Blocks(99, 60)}
    assert decided(tenants=tenants({"tenant": 1}, {"tenant": 2}), **base).admit.id.tolist() == [102]


def test_who_comes_back_from_idle_is_lifted_and_who_never_left_is_not() -> None:
    memory = both_wait({"tenant": 1}, {"tenant": 2})
    for done in (100, 200, 300):  # tenant 2 is idle
        memory = both_wait({"tenant": 1} | served(done), memory=memory)
    assert first_of(memory, served(301), served(0)) == 1  # lifted to 301: equal, and the other one is earlier
    memory = both_wait({"tenant": 1} | served(300), {"tenant": 2}, memory=memory)
    assert first_of(memory, served(310), served(5)) == 2
    assert first_of(memory, served(310), served(11)) == 1
    alone = both_wait({"tenant": 2} | served(400), memory=memory)  # 1 left at 300, 2 stands at 700
    assert first_of(alone, served(300), served(401)) == 1  # lifted from 300 to 701: equal, and earlier
    ahead = both_wait({"tenant": 1} | served(9_000), {"tenant": 2}, memory=memory)
    gone = both_wait({"tenant": 2} | served(100), memory=ahead)
    assert first_of(gone, served(9_000), served(200)) == 2  # what 1 was served more is not forgiven


def test_memory_stays_within_bounds() -> None:
    rows = [{"tenant": n, **served(n)} for n in range(MAX_TENANTS + 300)]
    shown = Snapshot(tenants=tenants(*rows), waiting=waiting(*({"tenant": n} for n in range(0, MAX_TENANTS, 7))))
    ranking = Fair().rank(shown, b"")
    assert len(ranking.memory) <= 8 + 24 * MAX_TENANTS
    again = Fair().rank(shown, ranking.memory)
    assert len(again.memory) == len(ranking.memory)


def test_a_tenant_that_the_table_does_not_name_harms_nobody() -> None:
    assert decided(waiting=waiting({"tenant": 9}, {"tenant": 8})).admit.rows == 2


@pytest.mark.parametrize("seed", range(4))
def test_services_of_tenants_that_both_wait_differ_by_at_most_the_bound(seed: int) -> None:
    """Theorem 4.4: |W_f - W_g| <= 2 max(w_p L_input, w_q M), over any time in which both always wait. Here plus a step
    of each, since the decision sees what was done a step ago."""
    rand = random.Random(seed)
    weights = {1: 1000, 2: 1000, 3: rand.choice([500, 2000])}
    pool, longest = 24, 60
    settings = Settings(max_step_tokens=48, max_rows=6, chunk_cap_tokens=32)
    requests, id_ = [], 0
    for tenant, count, prompt, output in ((1, 60, 12, 20), (2, 90, longest, 3), (3, 60, 30, rand.randint(5, 30))):
        for _ in range(count):
            id_ += 1
            requests.append(Toy(id_, 0, max(rand.randint(prompt // 2, prompt), 1), output, output, tenant=tenant))
    rand.shuffle(requests)
    for number, request in enumerate(requests, 1):
        request.id = number
    executor = ToyExecutor(requests, settings, pool, policy=PolicyChoice("fair"), weights=weights)
    history: list[dict[int, float]] = []
    while True:
        executor.turn(decide)
        if len({r.tenant for r in executor.waiting}) < 3:
            break
        totals = executor.served
        history.append({t: (totals[t][0] + 2 * totals[t][1]) * 1000 / weights[t] for t in weights})
    assert len(history) > 100
    most = max(1000 / weight for weight in weights.values())
    bound = 2 * max(longest, 2 * pool * settings.block_tokens) * most + 2 * (48 + 2 * 6) * most
    gap = np.array([[h[1] - h[2], h[1] - h[3], h[2] - h[3]] for h in history])
    assert (gap.max(axis=0) - gap.min(axis=0)).max() <= bound
    assert min(history[-1].values()) > bound / 2  # it was a while
