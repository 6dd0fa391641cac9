"""Faults that users reported of other servers, on the virtual-clock harness; numbers as in docs/reported-faults.md."""

from __future__ import annotations

import random
from dataclasses import replace

from executor_svc.request import FinishReason, Sampling
from jitney.snapshot import Outcome, Settings
from simulator.simulation import Simulation
from tests.support.gold import gold
from tests.support.policies import under

B = 4
SETTINGS = Settings(max_step_tokens=32, max_rows=8, block_tokens=B, context_tokens=2048, chunk_cap_tokens=16)


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


def test_01_a_prompt_larger_than_the_pool_is_refused_and_the_next_one_runs() -> None:
    sim = Simulation(SETTINGS, pool_blocks=50)
    never = sim.submit(prompt(1, 51 * B), 4)
    small = sim.submit(prompt(2, B), 4)
    sim.run_until_idle()
    assert never.answer.finish is not None and never.answer.finish.reason is FinishReason.REFUSED
    assert "50" in never.answer.finish.message and "51" in never.answer.finish.message
    assert small.answer.token_ids == gold(SETTINGS, small)
    sim.check_clean()


def test_01_a_prompt_of_the_whole_pool_runs() -> None:
    for tokens in (50 * B, 50 * B - 1):
        sim = Simulation(SETTINGS, pool_blocks=50)
        whole = sim.submit(prompt(1, tokens), 1)
        sim.run_until_idle()
        assert whole.answer.token_ids == gold(SETTINGS, whole)
        sim.check_clean()


def test_02_long_prompts_that_do_not_fit_together_are_not_thrown_out_again_and_again() -> None:
    long = 400
    sim = Simulation(SETTINGS, pool_blocks=int(1.5 * long / B) + 130)
    decoding = sim.submit(prompt(0, 8), 500)
    first = sim.submit(prompt(1, long), 8, at_us=100_000)
    second = sim.submit(prompt(2, long), 8, at_us=100_000)
    sim.run_until_idle()
    for watched in (decoding, first, second):
        finish = watched.answer.finish
        assert finish is not None and finish.preemptions <= 2
        assert watched.answer.token_ids == gold(SETTINGS, watched)
    assert sim.loop.counters.prompt_tokens <= 2 * (8 + long + long)
    step = max(record.step_us for record in sim.loop.counters.steps)
    assert max(decoding.gaps_us) <= 3 * step


def test_04_something_always_runs_while_something_waits() -> None:
    rng = random.Random(4)
    sim = Simulation(SETTINGS, pool_blocks=80)
    for i in range(150):
        watched = sim.submit(
            prompt(i, rng.randrange(1, 200)), rng.randrange(1, 60), at_us=rng.randrange(20_000_000), priority=i % 5
        )
        if rng.random() < 0.2:
            sim.abort(watched, rng.randrange(20_000_000, 30_000_000))
    longest_stall_us, stalled_since, step = 0, 0, -1
    while not sim.idle:
        sim.loop.tick()
        now_us = sim.clock.now_us()
        if sim.loop.step != step or not sim.loop.registry.num_waiting:
            step, stalled_since = sim.loop.step, now_us
        longest_stall_us = max(longest_stall_us, now_us - stalled_since)
        assert not sim.loop.watchdog.not_ready(now_us)
    assert longest_stall_us < 100_000
    sim.check_clean()


def test_04_a_loop_that_cannot_go_on_says_why() -> None:
    sim = Simulation(SETTINGS, pool_blocks=80)
    sim.submit(prompt(1, 8), 50)
    sim.run(100_000)
    sim.cache.crash(back_after_us=60_000_000)
    sim.run(40_000_000)
    reason = sim.loop.watchdog.not_ready(sim.clock.now_us())
    assert "1 requests wait and nothing runs" in reason
    sim.run_until_idle()
    assert not sim.loop.watchdog.not_ready(sim.clock.now_us())
    sim.check_clean()


def test_08_short_requests_do_not_wait_for_a_very_long_prompt() -> None:
    settings = Settings(max_step_tokens=64, max_rows=16, block_tokens=B, context_tokens=20_000, chunk_cap_tokens=48)
    long = 8000
    sim = Simulation(settings, pool_blocks=3500)
    streams = [sim.submit(prompt(i, 16), 400) for i in range(3)]
    big = sim.submit(prompt(50, long), 4, at_us=200_000)
    short = [sim.submit(prompt(100 + i, 16), 4, at_us=1_200_000) for i in range(10)]
    sim.run_until_idle()
    step = max(record.step_us for record in sim.loop.counters.steps)
    for stream in streams:
        assert max(stream.gaps_us) <= 2 * step
    for each in short:
        assert each.token_times_us[0] - 1_200_000 <= 16 * step
    alone = Simulation(settings, pool_blocks=3500)
    same = alone.submit(prompt(50, long), 4)
    alone.run_until_idle()
    took = big.token_times_us[0] - 200_000
    # Decodes and the short ones take their part of each step, the long prompt all the rest.
    assert took <= 1.3 * same.token_times_us[0]
    for watched in (*streams, big, *short):
        assert watched.answer.token_ids == gold(settings, watched)
    sim.check_clean()


def test_05_a_higher_priority_takes_a_row_from_a_lower_one_at_once() -> None:
    for low, high in ((0, 1), (-100, 100)):
        settings = replace(SETTINGS, max_rows=4)
        sim = Simulation(settings, pool_blocks=500, policy=under("priority"))
        sim.cache.audits = False
        streams = [sim.submit(prompt(i, 16), 250, at_us=i * 10_000, priority=low) for i in range(4)]
        urgent = sim.submit(prompt(9, 12), 8, at_us=2_000_000, priority=high)
        sim.run_until_idle()
        step = max(record.step_us for record in sim.loop.counters.steps)
        assert urgent.token_times_us[0] - 2_000_000 <= 2 * step + step
        gone = [s.answer.finish.preemptions for s in streams if s.answer.finish is not None]
        assert gone == [0, 0, 0, 1]  # the lowest priority, and of these the latest
        for watched in (*streams, urgent):
            assert watched.answer.token_ids == gold(settings, watched)
        sim.check_clean()


def test_05_a_higher_priority_takes_blocks_from_lower_ones() -> None:
    sim = Simulation(SETTINGS, pool_blocks=100, policy=under("priority"))
    streams = [sim.submit(prompt(i, 60), 100, at_us=i * 10_000, priority=-5) for i in range(5)]
    urgent = sim.submit(prompt(9, 120), 8, at_us=1_000_000, priority=5)
    sim.run_until_idle()
    step = max(record.step_us for record in sim.loop.counters.steps)
    own = -(-120 // SETTINGS.chunk_cap_tokens)
    assert urgent.token_times_us[0] - 1_000_000 <= (2 + own) * step
    for watched in (*streams, urgent):
        assert watched.answer.finish is not None and watched.answer.finish.preemptions <= 2
        assert watched.answer.token_ids == gold(SETTINGS, watched)
    sim.check_clean()


def test_07_a_top_priority_does_not_feel_thirty_low_ones() -> None:
    settings = Settings(max_step_tokens=96, max_rows=16, block_tokens=B, context_tokens=2048, chunk_cap_tokens=48)
    alone = Simulation(settings, pool_blocks=1500, policy=under("priority"))
    idle = alone.submit(prompt(1, 40), 8, priority=100)
    alone.run_until_idle()
    idle_us = idle.token_times_us[0]
    sim = Simulation(settings, pool_blocks=1500, policy=under("priority"))
    for i in range(30):
        sim.submit(prompt(100 + i, 30), 300, at_us=i * 1000)
    at = [2_000_000 + i * 400_000 for i in range(20)]
    urgent = [sim.submit(prompt(200 + i, 40), 8, at_us=us, priority=100) for i, us in enumerate(at)]
    sim.run_until_idle()
    step = max(record.step_us for record in sim.loop.counters.steps)
    for us, watched in zip(at, urgent, strict=True):
        own = step  # its prefill, beside the others' decodes
        assert watched.token_times_us[0] - us <= idle_us + 2 * step + own
        assert watched.answer.finish is not None and not watched.answer.finish.preemptions
    for watched in sim.watched:
        assert watched.answer.finish is not None and watched.answer.finish.preemptions <= 2
    sim.check_clean()


def test_10_ties_of_priority_and_arrival_under_the_priority_policy() -> None:
    sim = Simulation(SETTINGS, pool_blocks=400, policy=under("priority"))
    watched = [sim.submit(prompt(i, 8), 2, at_us=5000, priority=7) for i in range(200)]
    sim.run_until_idle()
    first = [each.token_times_us[0] for each in watched]
    assert first == sorted(first)
    sim.check_clean()


def test_10_equal_priority_and_arrival_keep_the_order_of_submission() -> None:
    sim = Simulation(SETTINGS, pool_blocks=400)
    watched = [sim.submit(prompt(i, 8), 2, at_us=5000, priority=7) for i in range(200)]
    sim.run_until_idle()
    first = [each.token_times_us[0] for each in watched]
    assert first == sorted(first)
    sim.check_clean()


def test_10_ties_of_requests_of_several_choices() -> None:
    """Choices of one request tie with each other and with everybody else: the order is that of submission, and of
    choices."""
    for policy in (under("priority"), None):
        sim = Simulation(SETTINGS, pool_blocks=400, policy=policy)
        for i in range(200):
            sampling = Sampling(temperature=1.0, seed=i)
            sim.submit_choices(prompt(i, 8), 2, 1 + i % 4 // 3 * 2, at_us=5000, priority=7, sampling=sampling)
        sim.run_until_idle()
        boarded = [(each.request.first_row_us, each.request.id) for each in sim.watched]
        hosts = [each for each in boarded if sim.watched[each[1] - 1].request.submission.choice == 0]
        assert hosts == sorted(hosts)
        assert len(sim.watched) == 300
        for each in sim.watched[::7]:
            assert each.answer.token_ids == gold(SETTINGS, each)
        sim.check_clean()


def test_12_a_request_gives_the_same_tokens_in_any_company() -> None:
    rng = random.Random(12)
    expected = None
    for turn in range(12):
        settings = Settings(
            max_step_tokens=rng.choice([9, 33, 100]),
            max_rows=rng.choice([3, 12]),
            block_tokens=B,
            context_tokens=512,
            chunk_cap_tokens=rng.choice([5, 17, 64]),
        )
        sim = Simulation(settings, pool_blocks=rng.choice([40, 90]))
        others = [sim.submit(prompt(turn * 100 + i, rng.randrange(1, 50)), 30) for i in range(8 if turn else 0)]
        watched = sim.submit(prompt(1, 37), 25)
        sim.run_until_idle()
        expected = expected or watched.answer.token_ids
        assert watched.answer.token_ids == expected, others


def test_32_work_of_a_client_that_went_away_stops_within_two_steps() -> None:
    step_us = 20_000
    for at_us in range(0, 400_000, 25_000):
        sim = Simulation(SETTINGS, pool_blocks=200, step_time_us=lambda plan: step_us)
        watched = sim.submit(prompt(1, 100), 200)
        other = sim.submit(prompt(2, 20), 30)
        sim.abort(watched, at_us + 1)
        ended_at = None
        while not sim.idle:
            sim.loop.tick()
            if watched.answer.finish is not None and ended_at is None:
                ended_at = sim.loop.step
        assert ended_at is not None
        assert watched.request.last_launched_step <= ended_at + 2
        assert other.answer.token_ids == gold(SETTINGS, other)
        sim.check_clean()


def test_34_aborts_in_every_state_leak_nothing() -> None:
    rng = random.Random(34)
    for round_ in range(15):
        sim = Simulation(SETTINGS, pool_blocks=60)
        shared = prompt(round_, 60)
        watched = [sim.submit([*shared, *prompt(i, 9)], 40, at_us=rng.randrange(100_000)) for i in range(12)]
        for each in watched:
            if rng.random() < 0.7:
                sim.abort(each, rng.randrange(100_000, 500_000))
        sim.run_until_idle()
        sim.check_clean()


def test_36_requests_that_expire_in_the_queue_cost_no_prefill() -> None:
    sim = Simulation(SETTINGS, pool_blocks=700)
    busy = [sim.submit(prompt(i, 8), 300) for i in range(SETTINGS.max_rows)]
    late = [sim.submit(prompt(100 + i, 40), 4, at_us=200_000, deadline_us=200_000) for i in range(100)]
    sim.run_until_idle()
    for each in late:
        finish = each.answer.finish
        assert finish is not None and finish.reason is FinishReason.DEADLINE
        assert finish.computed_prompt_tokens == 0
        assert 200_000 <= finish.total_us <= 250_000
    assert sim.loop.counters.prompt_tokens == sum(len(each.request.submission.prompt_ids) for each in busy)
    assert sim.loop.counters.outcomes == {Outcome.DEADLINE: 100, Outcome.LENGTH: len(busy)}


def test_46_gauges_are_zero_after_everything_was_aborted() -> None:
    sim = Simulation(SETTINGS, pool_blocks=400)
    watched = [sim.submit(prompt(i, 20), 500) for i in range(100)]
    sim.run(500_000)
    for each in watched:
        sim.abort(each, 500_001)
    sim.run_until_idle()
    sim.check_clean()
    assert sim.loop.counters.outcomes == {Outcome.ABORTED: 100}


def test_49_free_blocks_stay_constant_over_thousands_of_requests() -> None:
    rng = random.Random(49)
    sim = Simulation(SETTINGS, pool_blocks=64)
    sim.cache.audits = False
    for _ in range(20):
        for _ in range(100):
            watched = sim.submit(
                prompt(rng.randrange(50), rng.randrange(1, 30)),
                rng.randrange(1, 12),
                at_us=sim.clock.now_us() + rng.randrange(500_000),
                stop_token_ids=[rng.randrange(1000)],
                deadline_us=rng.choice([0, 0, 0, 50_000]),
            )
            if rng.random() < 0.1:
                sim.abort(watched, sim.clock.now_us() + rng.randrange(500_000, 600_000))
        sim.run_until_idle()
        sim.check_clean()
        sim.watched.clear()
