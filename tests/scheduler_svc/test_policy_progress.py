"""Under every policy everything that waits runs to its end, below saturation and, for what cannot starve, above it."""

from __future__ import annotations

import random

import pytest

from jitney.snapshot import PolicyChoice, Rates, Settings
from scheduler_svc.decide import decide
from scheduler_svc.policies import BUILT_IN
from tests.support.toy_executor import Toy, ToyExecutor

NAMES = [kind.name for kind in BUILT_IN.kinds]
STEP_TIME = Rates(prefill_tokens_per_s=10_000, step_base_ns=500_000, step_per_row_ns=20_000, step_per_token_ns=50_000)


def run_to_end(executor: ToyExecutor, most_steps: int = 6_000) -> None:
    idle = 0
    while executor.busy:
        executor.turn(decide)
        runs = any(r.in_flight for r in executor.running)
        idle = 0 if runs or not executor.waiting else idle + 1
        assert idle <= 3, "requests wait, and nothing runs"
        assert executor.step <= most_steps


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_all_that_waits_runs_to_its_end(name: str, seed: int) -> None:
    rand, pool, most = random.Random(seed), [20, 40, 80][seed], seed
    settings = Settings(
        max_step_tokens=rand.choice([16, 64]),
        max_rows=rand.choice([4, 8]),
        chunk_cap_tokens=rand.choice([8, 32]),
        max_preemptions=most,
    )
    requests = []
    for id_ in range(1, 31):
        prompt = rand.choice([1, 15, 16, 17, 100, pool * 16 - 1])
        new = max(1, min(rand.choice([1, 8, 60]), pool * 16 + 1 - prompt))
        arrival, output = id_ * rand.randrange(0, 10_000), rand.randint(1, new)
        requests.append(
            Toy(
                id_,
                arrival,
                prompt,
                output,
                new,
                priority=rand.randint(-100, 100),
                tenant=rand.randrange(3),
                ttft_deadline_us=rand.choice([0, arrival + 50_000]),
                deadline_us=rand.choice([0, 0, arrival + 500_000]),
                predicted=rand.choice([-1, output, 5]),
            )
        )
    executor = ToyExecutor(requests, settings, pool, policy=PolicyChoice(name), rates=STEP_TIME)
    run_to_end(executor)
    assert sorted(r.id for r in executor.ended) == list(range(1, 31)) and not executor.refused
    assert max(r.preemptions for r in executor.ended) <= most
    assert all(r.generated == r.output for r in executor.ended)


@pytest.mark.parametrize(
    "choice",
    [
        PolicyChoice("deadline", (("best_effort_ms", 2_000),)),
        PolicyChoice("fair"),
        PolicyChoice("fcfs"),
        PolicyChoice("mlfq", (("boost_s", 1), ("quantum_1", 4), ("quantum_2", 8))),
        PolicyChoice("priority", (("aging_us_per_level", 20_000),)),
        PolicyChoice("sjf", (("aging_us_per_token", 20_000),)),
    ],
    ids=lambda choice: choice.name,
)
def test_nothing_starves_under_overload(choice: PolicyChoice) -> None:
    """One request of low rank, and twice what the machine can do of high rank: it gets through all the same."""
    settings = Settings(max_step_tokens=32, max_rows=2, chunk_cap_tokens=16)
    low = Toy(1, 0, 16, 40, 40, priority=-20, tenant=1, predicted=40)
    rest = [
        Toy(2 + n, n * 40_000, 16, 8, 8, priority=20, tenant=2, deadline_us=n * 40_000 + 200_000_000, predicted=8)
        for n in range(300)
    ]
    executor = ToyExecutor([low, *rest], settings, 200, policy=choice, step_us=20_000)
    while low.ended_step < 0:
        executor.turn(decide)
        assert executor.waiting or executor.arriving, "it came last of all"
        assert executor.step <= 1_000
