"""A model that takes a second step while one is in flight: the loop queues it as soon as it is decided, and what the
first one turns out to have finished changes no token and leaves nothing behind."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from executor_svc.live_request import State
from executor_svc.request import FinishReason, Sampling
from executor_svc.step_plan import StepPlan, StepResult
from jitney.snapshot import Settings
from simulator.simulation import Asked, Simulation, Watched
from simulator.tiers import MB
from tests.support.gold import gold
from tests.support.tiered import SETTINGS, check_tokens, prompt, tiered

B = SETTINGS.block_tokens


def queued(settings: Settings = SETTINGS, pool_blocks: int = 256) -> Simulation:
    return Simulation(settings, pool_blocks, queues=True)


def watch(sim: Simulation) -> list[tuple[str, int]]:
    """Launches and results of steps, in order."""
    seen: list[tuple[str, int]] = []
    launch, poll = sim.model.launch, sim.model.poll

    def launching(plan: StepPlan) -> None:
        seen.append(("launched", plan.step))
        launch(plan)

    def polling() -> StepResult | None:
        result = poll()
        if result is not None:
            seen.append(("over", result.step))
        return result

    sim.model.launch, sim.model.poll = launching, polling  # type: ignore[method-assign]
    return seen


def both_in_flight(sim: Simulation) -> bool:
    return len(sim.loop._flights) == 2


def test_a_step_is_launched_before_the_one_before_it_is_over() -> None:
    sim = queued()
    seen = watch(sim)
    watched = sim.submit(prompt(1, 10), 20)
    sim.run_until_idle()
    assert watched.answer.token_ids == gold(SETTINGS, watched)
    for step in range(1, 20):
        assert seen.index(("launched", step + 1)) < seen.index(("over", step))
    for step in range(1, 19):
        assert seen.index(("over", step)) < seen.index(("launched", step + 2))
    assert sim.loop.counters.computed_tokens == 10 + 19
    sim.check_clean()


def test_no_time_passes_between_two_steps() -> None:
    spent = []
    for queues in (False, True):
        sim = Simulation(SETTINGS, 256, scheduler_latency_us=9_000, queues=queues)
        sim.submit(prompt(1, 10), 40)
        sim.run_until_idle()
        steps = [(record.at_us, record.step_us) for record in sim.loop.counters.steps]
        spent.append(steps[-1][0] - steps[0][0])
        assert all(step_us in (10_100, 11_000) for _, step_us in steps)  # however early it was launched
    alone, behind = spent
    assert behind < alone


@pytest.mark.parametrize("by", ["token", "text", "abort", "deadline"])
@pytest.mark.parametrize("after", [3, 4, 5, 6])
def test_an_end_that_is_found_late_leaves_nothing_behind_it(by: str, after: int) -> None:
    """At every place in a block. Beside it a row goes on."""
    said = gold(SETTINGS, queued().submit(prompt(3, 2 * B), 30))
    assert said[after] not in said[:after]
    sim = queued()
    beside = sim.submit(prompt(4, 10), 30)
    how: dict[str, Asked] = {"token": {"stop_token_ids": [said[after]]}, "text": {"stop": [f"{said[after]} "]}}
    watched = sim.submit(prompt(3, 2 * B), 30, **how.get(by, {}))
    request = watched.request
    if by in ("abort", "deadline"):
        while len(watched.answer.token_ids) < after + 1:
            sim.loop.tick()
        if by == "abort":
            sim.loop.intake.abort(request, "its client is gone")
        else:
            sim.loop.registry.deadline_us[request.slot] = 1
            sim.loop.registry._with_deadline += 1
            sim.loop.registry._next_due_us = 1
            request.submission = replace(request.submission, deadline_us=1)
    while request.state is not State.ENDED:
        sim.loop.tick()
    assert watched.answer.token_ids == said[: after + 1]
    step = request.last_launched_step
    if sim.loop._in_flight_step:
        assert step >= sim.loop._in_flight_step  # it was queued, and is computed for nothing
        held = list(request.blocks)
        while sim.loop._in_flight_step and sim.loop._in_flight_step <= step:
            assert request.blocks == held
            sim.loop.tick()
    sim.run_until_idle()
    assert watched.answer.token_ids == said[: after + 1]
    assert beside.answer.token_ids == gold(SETTINGS, beside)
    sim.check_clean()
    again = sim.submit([*prompt(3, 2 * B), *said], 5)
    sim.run_until_idle()
    assert again.answer.finish is not None
    committed = 2 * B + after  # the last token's keys and values are nobody's
    assert again.answer.finish.cached_device_tokens == committed // B * B
    assert again.answer.token_ids == gold(SETTINGS, again)
    sim.check_clean()


def test_nobody_is_asked_while_two_steps_are_in_flight() -> None:
    sim = queued(pool_blocks=40)
    asked = []
    ask = sim.scheduler.ask

    def asking(snapshot: object) -> None:
        asked.append(both_in_flight(sim))
        ask(snapshot)  # type: ignore[arg-type]

    sim.scheduler.ask = asking  # type: ignore[method-assign]
    watched = [sim.submit(prompt(i, 20), 30, at_us=7_000 * i) for i in range(8)]
    sim.run_until_idle()
    assert asked and not any(asked)
    check_tokens(watched)


def test_a_small_pool_preempts_and_swaps_and_changes_no_token() -> None:
    sim = tiered(24, cpu=100, copy=2 * MB, queues=True)
    seen = watch(sim)
    watched = [sim.submit(prompt(i, 20), 40) for i in range(6)]
    sim.run_until_idle()
    check_tokens(watched)
    assert sim.loop.counters.preemptions > 0
    assert any(seen[i][0] == seen[i + 1][0] == "launched" for i in range(len(seen) - 1))
    sim.check_clean()


def crash(sim: Simulation, back_after_us: int) -> None:
    if sim.cache.connected:
        sim.cache.crash(back_after_us)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_with_choices_stops_aborts_deadlines_and_crashes(seed: int) -> None:
    rng = random.Random(seed)
    settings = replace(
        SETTINGS,
        max_step_tokens=rng.choice([16, 64]),
        max_rows=rng.choice([3, 6, 16]),
        block_tokens=rng.choice([2, 4, 16]),
        chunk_cap_tokens=rng.choice([8, 32]),
    )
    sim = queued(settings, rng.choice([160, 400]) // settings.block_tokens + 8)
    seen = watch(sim)
    away_from, away_to = 200_000, 200_000 + rng.choice([0, 400_000])
    sim.scheduler.away = lambda now: away_to if away_from <= now < away_to else now
    sim.scheduler.latency_us = rng.choice([500, 4_000, 9_000])
    for _ in range(rng.randrange(3)):
        sim.clock.at(rng.randrange(1_000_000), partial(crash, sim, rng.choice([10_000, 300_000])))
    stems = [prompt(100 + i, rng.randrange(1, 60)) for i in range(4)]
    for i in range(30):
        choices = sim.submit_choices(
            [*rng.choice(stems), *prompt(1000 + i, rng.randrange(1, 30))],
            rng.randrange(1, 40),
            rng.choice([1, 1, 1, 3]),
            at_us=rng.randrange(1_000_000),
            stop_token_ids=rng.sample(range(1000), 20),
            sampling=Sampling(temperature=1.0, seed=i),
            deadline_us=rng.choice([0, 0, 0, 300_000]),
        )
        if rng.random() < 0.2:
            sim.abort(choices[0], rng.randrange(1_500_000))
    sim.run_until_idle()
    for each in sim.watched:
        check_answer(settings, each)
    assert any(seen[i][0] == seen[i + 1][0] == "launched" for i in range(len(seen) - 1))
    sim.check_clean()


def check_answer(settings: Settings, watched: Watched) -> None:
    finish, got, expected = watched.answer.finish, watched.answer.token_ids, gold(settings, watched)
    assert finish is not None
    if finish.reason in (FinishReason.LENGTH, FinishReason.STOP):
        assert got == expected
    else:
        assert got == expected[: len(got)]
