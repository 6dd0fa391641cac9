"""Decisions applied to a toy executor, step after step: everything ends, and nobody is thrown about."""

from __future__ import annotations

import random

import pytest

from jitney.snapshot import Settings
from scheduler_svc.decide import decide
from tests.support.toy_executor import Toy, ToyExecutor

CHUNKS = 64


def run_to_end(requests: list[Toy], settings: Settings, pool: int, most_steps: int = 20_000) -> ToyExecutor:
    executor = ToyExecutor(requests, settings, pool)
    idle = 0
    while executor.busy:
        executor.turn(decide)
        runs = any(r.in_flight for r in executor.running)
        idle = 0 if runs or not executor.waiting else idle + 1
        assert idle <= 3, "requests wait, and nothing runs"
        assert executor.step <= most_steps
    return executor


@pytest.mark.parametrize("seed", range(9))
def test_all_that_waits_runs_to_its_end(seed: int) -> None:
    rand, max_preemptions = random.Random(seed), seed % 3
    pool = rand.choice([20, 40, 80])
    settings = Settings(
        max_step_tokens=rand.choice([16, 128]),
        max_rows=rand.choice([4, 16]),
        chunk_cap_tokens=rand.choice([8, CHUNKS]),
        block_reserve=rand.choice([0, 3]),
        max_preemptions=max_preemptions,
    )
    requests = []
    for id_ in range(1, 41):
        prompt = rand.choice([1, 15, 16, 17, 100, 250, pool * 16 - 1, pool * 16 + 1])
        new = max(1, min(rand.choice([1, 8, 60, 150]), pool * 16 + 1 - prompt))
        requests.append(Toy(id_, rand.randrange(0, 300_000), prompt, rand.randint(1, new), new))
    executor = run_to_end(requests, settings, pool)
    assert sorted([r.id for r in executor.ended] + executor.refused) == list(range(1, 41))
    assert set(executor.refused) == {r.id for r in requests if r.prompt > pool * 16}
    assert max(r.preemptions for r in executor.ended) <= max_preemptions
    assert all(r.generated == r.output for r in executor.ended)


def test_first_come_first_served_when_all_are_alike() -> None:
    requests = [Toy(id_, 1000 * id_, 60, 20, 20) for id_ in range(1, 30)]
    executor = run_to_end(requests, Settings(max_step_tokens=64, max_rows=4), pool=25)
    firsts = [r.first_token_step for r in sorted(executor.ended, key=lambda r: r.id)]
    assert firsts == sorted(firsts)


def test_a_long_prompt_is_not_thrown_out_again_and_again() -> None:
    """Case 2: the pool holds one and a half prompts, a chunk is an eighth of one."""
    prompt, settings = 512, Settings(max_step_tokens=80, max_rows=8, chunk_cap_tokens=64)
    decoder = Toy(1, 0, 16, 500, 500)
    rest = [Toy(2, 10_000, prompt, 20, 20), Toy(3, 10_000, prompt, 20, 20)]
    executor = run_to_end([decoder, *rest], settings, pool=48 + 2)
    assert max(r.preemptions for r in executor.ended) <= 2
    assert executor.prefilled <= 2 * (16 + 2 * prompt)
    gaps = [b - a for a, b in zip(decoder.token_steps, decoder.token_steps[1:], strict=False)]
    assert max(gaps) <= 2


def test_short_prompts_get_through_beside_a_long_one() -> None:
    """Case 8: one prompt of 100,000 tokens, ten of 64 behind it, one answer being decoded."""
    settings = Settings(max_step_tokens=256, max_rows=32, context_tokens=200_000, chunk_cap_tokens=128)
    decoder, long = Toy(1, 0, 10, 900, 900), Toy(2, 1_000, 100_000, 5, 5)
    short = [Toy(id_, 200_000, 64, 5, 5) for id_ in range(3, 13)]
    executor = run_to_end([decoder, long, *short], settings, pool=8_000)
    gaps = [b - a for a, b in zip(decoder.token_steps, decoder.token_steps[1:], strict=False)]
    assert max(gaps) == 1
    assert max(r.first_token_step for r in short) <= 200 + 10
    alone = run_to_end([Toy(1, 0, 10, 900, 900), Toy(2, 1_000, 100_000, 5, 5)], settings, pool=8_000)
    assert long.ended_step <= 1.2 * next(r for r in alone.ended if r.id == 2).ended_step
    assert executor.preemptions == 0


def test_blocks_for_growth_are_kept_so_that_preemption_stays_rare() -> None:
    rand = random.Random(3)
    requests = [Toy(id_, 1000 * id_, rand.randint(8, 120), 80, 80) for id_ in range(1, 80)]
    executor = run_to_end(requests, Settings(max_step_tokens=128, max_rows=16, chunk_cap_tokens=CHUNKS), pool=100)
    assert executor.preemptions <= len(requests) // 2
    assert executor.max_running >= 8  # and yet the pool is used
