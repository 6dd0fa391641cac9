"""Static batches, horizons and substitutes on the real loop: no token changes, nothing leaks."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import scheduler_svc.decide as core
from executor_svc.request import FinishReason
from jitney.block_ops import Batch
from jitney.snapshot import Batching, HorizonKind, Rates, Settings
from scheduler_svc.admission import Boarding
from simulator.cache import VirtualCache
from simulator.simulation import Simulation
from tests.support.gold import gold

SMALL = Settings(max_step_tokens=64, max_rows=8, block_tokens=4, context_tokens=512, chunk_cap_tokens=32)
ROOMY, TIGHT = 256, 40
_ALONE: dict[int, list[int]] = {}


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


def mixed(settings: Settings, pool: int, requests: int = 24, *, rests: bool = False) -> Simulation:
    """Short and long answers, some of which end by a stop token; every token is held against a run alone."""
    sim, rand = Simulation(settings, pool, rests=rests), random.Random(1)
    sim.cache.audits = False
    for number in range(requests):
        ids, most, arrives = prompt(number, rand.randrange(3, 40)), rand.choice([3, 8, 30, 60]), rand.randrange(400_000)
        sim.submit(ids, most, at_us=arrives, stop_token_ids=rand.sample(range(1000), 20))
    sim.run_until_idle()
    for number, watched in enumerate(sim.watched):
        if number not in _ALONE:
            _ALONE[number] = gold(SMALL, watched)
        assert watched.answer.token_ids == _ALONE[number]
    sim.check_clean()
    return sim


def row_steps(sim: Simulation) -> int:
    return sum(record.rows for record in sim.loop.counters.steps)


@pytest.mark.parametrize("pool", [ROOMY, TIGHT])
@pytest.mark.parametrize("batching", [Batching.STATIC_PADDED, Batching.STATIC_DROPPING])
def test_a_static_batch_gives_the_same_tokens(batching: Batching, pool: int) -> None:
    mixed(replace(SMALL, batching=batching), pool)


@pytest.mark.parametrize("pool", [ROOMY, TIGHT])
@pytest.mark.parametrize(
    "horizon",
    [{"horizon_steps": 5}, {"horizon_steps": 64}, {"horizon_kind": HorizonKind.UNTIL_EVENT}],
    ids=["5", "64", "event"],
)
def test_a_horizon_gives_the_same_tokens(horizon: dict[str, Any], pool: int) -> None:
    every = mixed(SMALL, pool).loop.counters
    held = mixed(replace(SMALL, **horizon), pool).loop.counters
    assert held.decisions < every.decisions / 2
    assert held.coasted_steps == 0


@pytest.mark.parametrize("pool", [ROOMY, TIGHT])
def test_nobody_is_asked_where_there_is_nothing_to_decide(pool: int) -> None:
    every, resting = mixed(SMALL, pool), mixed(SMALL, pool, rests=True)
    assert resting.loop.counters.decisions < every.loop.counters.decisions
    assert resting.loop.counters.coasted_steps == every.loop.counters.coasted_steps == 0
    assert resting.loop.counters.stalled_rows <= every.loop.counters.stalled_rows
    assert resting.loop.step <= every.loop.step


def test_one_request_alone_is_decided_about_now_and_then_only() -> None:
    decisions, first_tokens_us = [], []
    for rests in (False, True):
        sim = Simulation(SMALL, ROOMY, rests=rests)
        sim.submit(prompt(1, 10), 200)
        second = sim.submit(prompt(2, 40), 5, at_us=500_000)
        sim.run_until_idle()
        assert all(w.answer.token_ids == gold(SMALL, w) for w in sim.watched)
        sim.check_clean()
        decisions.append(sim.loop.counters.decisions)
        first_tokens_us.append(second.token_times_us[0])
    assert decisions[1] < decisions[0] / 5
    assert first_tokens_us[1] <= first_tokens_us[0]  # who comes is decided about at once


def test_continuous_batching_saves_what_static_batches_waste() -> None:
    runs = [
        mixed(replace(SMALL, batching=b), ROOMY)
        for b in (Batching.CONTINUOUS, Batching.STATIC_DROPPING, Batching.STATIC_PADDED)
    ]
    continuous, dropping, padded = runs
    assert continuous.clock.now_us() < dropping.clock.now_us() < padded.clock.now_us()
    assert row_steps(padded) > 1.5 * row_steps(continuous)
    assert continuous.loop.step < dropping.loop.step


def test_a_batch_is_collected_and_runs_to_its_end() -> None:
    sim = Simulation(replace(SMALL, batching=Batching.STATIC_PADDED), ROOMY)
    first = [sim.submit(prompt(n, 10), 4 + 10 * n) for n in range(3)]
    late = [sim.submit(prompt(9 + n, 10), 5, at_us=60_000) for n in range(2)]
    sim.run_until_idle()
    end = max(w.token_times_us[-1] for w in first)
    assert min(w.token_times_us[0] for w in late) > end
    steps = [record.rows for record in sim.loop.counters.steps if record.at_us < end]
    assert steps == [3] * len(steps)  # what has ended is computed on as padding
    assert [len(w.answer.token_ids) for w in first] == [4, 14, 24]
    assert all(w.answer.finish is not None and w.answer.finish.reason is FinishReason.LENGTH for w in first)
    sim.check_clean()


def crowded(steps: int) -> Simulation:
    """200 requests for 16 rows, whose answers end by stop tokens, about 25 tokens long."""
    settings = Settings(
        max_step_tokens=128,
        max_rows=16,
        block_tokens=4,
        context_tokens=512,
        chunk_cap_tokens=32,
        horizon_steps=steps,
    )
    sim, rand = Simulation(settings, 600), random.Random(1)
    sim.cache.audits = False
    for number in range(200):
        stops = rand.sample(range(1000), 40)
        sim.submit(prompt(number, rand.randrange(3, 20)), 120, at_us=rand.randrange(4_000), stop_token_ids=stops)
    sim.run_until_idle()
    sim.check_clean()
    return sim


def idle_per_completion(sim: Simulation) -> float:
    """Rows that stood empty while requests waited, per request."""
    most = sim.loop.settings.max_rows
    steps = [record for record in sim.loop.counters.steps if record.waiting]
    return sum(most - record.rows for record in steps) / len(sim.watched)


@pytest.mark.parametrize("steps", [1, 5])
def test_substitutes_take_the_rows_of_those_that_end(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 0.15 idle row-steps per completion instead of 1.0 with a decision each step, 0.6 instead of 3.1 with
    one every five steps."""
    ahead = crowded(steps)
    monkeypatch.setattr(core, "substitutes", lambda *_, **__: Boarding())
    without = crowded(steps)
    assert without.loop.counters.substituted == 0 < ahead.loop.counters.substituted
    assert idle_per_completion(ahead) < 0.3 * idle_per_completion(without)
    assert ahead.loop.step < without.loop.step
    answers = [[w.answer.token_ids for w in sim.watched] for sim in (ahead, without)]
    assert answers[0] == answers[1]


def test_a_substitute_that_is_named_again_reserves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reserves: list[int] = []
    send = VirtualCache.send

    def counted(cache: VirtualCache, batch: Batch) -> None:
        reserves.extend(reserve.request for reserve in batch.reserves)
        send(cache, batch)

    monkeypatch.setattr(VirtualCache, "send", counted)
    sim = crowded(1)
    assert sim.loop.counters.substituted > 0
    assert len(reserves) < 2 * len(sim.watched)


def crash(sim: Simulation, back_after_us: int) -> None:
    if sim.cache.connected:
        sim.cache.crash(back_after_us)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_the_settings_and_whatever_fails_no_token_changes(seed: int) -> None:
    """Aborts, deadlines, stop tokens, a scheduler that is away, a cache that is restarted."""
    rand = random.Random(seed)
    settings = Settings(
        max_step_tokens=rand.choice([16, 48, 128]),
        max_rows=rand.choice([2, 5, 16]),
        block_tokens=rand.choice([2, 4, 16]),
        context_tokens=512,
        chunk_cap_tokens=rand.choice([8, 16, 64]),
        batching=rand.choice([Batching.CONTINUOUS, Batching.STATIC_PADDED, Batching.STATIC_DROPPING]),
        horizon_kind=rand.choice([HorizonKind.STEPS, HorizonKind.STEPS, HorizonKind.UNTIL_EVENT]),
        horizon_steps=rand.choice([1, 2, 5, 100]),
        target_tpot_us=rand.choice([0, 12_000]),
    )
    pool = rand.choice([160, 400]) // settings.block_tokens + 8
    rates = Rates(step_base_ns=10_000_000, step_per_token_ns=100_000)
    sim = Simulation(settings, pool, rates=rates)
    away_to = 200_000 + rand.choice([0, 400_000, 3_000_000])
    sim.scheduler.away = lambda now: away_to if 200_000 <= now < away_to else now
    for _ in range(rand.randrange(3)):
        sim.clock.at(rand.randrange(1_500_000), partial(crash, sim, rand.choice([10_000, 500_000])))
    stems = [prompt(100 + n, rand.randrange(1, 60)) for n in range(4)]
    for number in range(40):
        watched = sim.submit(
            [*rand.choice(stems), *prompt(1000 + number, rand.randrange(1, 40))],
            rand.randrange(1, 40),
            at_us=rand.randrange(1_500_000),
            deadline_us=rand.choice([0, 0, 0, 300_000]),
            stop_token_ids=rand.sample(range(1000), rand.choice([0, 30])),
        )
        if rand.random() < 0.2:
            sim.abort(watched, rand.randrange(2_000_000))
    sim.run_until_idle(600_000_000)
    for watched in sim.watched:
        finish, told, expected = watched.answer.finish, watched.answer.token_ids, gold(settings, watched)
        assert finish is not None
        whole = finish.reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert told == (expected if whole else expected[: len(told)])
    sim.check_clean()
