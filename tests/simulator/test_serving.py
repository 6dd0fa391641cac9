"""The real loop, decide and ledger on a virtual clock: everything ends, nothing leaks, no token changes."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from executor_svc.request import FinishReason
from jitney.snapshot import Settings
from simulator.simulation import Simulation, Watched
from tests.support.gold import gold

SMALL = Settings(max_step_tokens=64, max_rows=8, block_tokens=4, context_tokens=512, chunk_cap_tokens=32)


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


def crash(sim: Simulation, back_after_us: int) -> None:
    if sim.cache.connected:
        sim.cache.crash(back_after_us)


def check_gold(settings: Settings, watched: Watched) -> None:
    assert watched.answer.finish is not None
    assert watched.answer.token_ids == gold(settings, watched)


def test_requests_that_go_while_they_board_use_up_nothing() -> None:
    sim = Simulation(SMALL, pool_blocks=64)
    for number in range(3 * SMALL.max_rows):
        arrives_us = sim.clock.now_us() + 1000
        sim.abort(sim.submit(prompt(number, 10), 20, at_us=arrives_us), arrives_us + 1200)  # the decision is there
        sim.run_until_idle()
    assert sim.loop.step == 0
    check_gold(SMALL, _completed(sim, sim.submit(prompt(1, 10), 20)))


def _completed(sim: Simulation, watched: Watched) -> Watched:
    sim.run_until_idle()
    return watched


def test_one_request_runs_to_its_length() -> None:
    sim = Simulation(SMALL, pool_blocks=64)
    watched = sim.submit(prompt(1, 10), 20)
    sim.run_until_idle()
    finish = watched.answer.finish
    assert finish is not None and finish.reason is FinishReason.LENGTH
    assert len(watched.answer.token_ids) == 20 == finish.generated_tokens
    assert finish.prompt_tokens == 10 == finish.computed_prompt_tokens
    assert sim.loop.counters.computed_tokens == 10 + 19
    sim.check_clean()


def test_a_context_without_end_costs_no_room_that_the_pool_has_not() -> None:
    sim = Simulation(replace(SMALL, context_tokens=2**31 - 1), pool_blocks=8)
    assert sim.loop.blocks.table.shape[1] == 8
    watched = sim.submit(prompt(1, 12), 20)  # all of the pool
    sim.run_until_idle()
    assert len(watched.answer.token_ids) == 20
    sim.check_clean()


def test_many_requests_share_steps_and_none_changes() -> None:
    sim = Simulation(SMALL, pool_blocks=256)
    watched = [sim.submit(prompt(i, 3 + 7 * i % 60), 5 + i % 17, at_us=1000 * i) for i in range(40)]
    sim.run_until_idle()
    for each in watched:
        check_gold(SMALL, each)
    assert max(record.rows for record in sim.loop.counters.steps) == SMALL.max_rows
    sim.check_clean()


def test_a_pool_too_small_for_all_preempts_and_still_gives_the_same_tokens() -> None:
    sim = Simulation(SMALL, pool_blocks=24)
    watched = [sim.submit(prompt(i, 20), 40) for i in range(6)]
    sim.run_until_idle()
    assert sim.loop.counters.preemptions > 0
    for each in watched:
        check_gold(SMALL, each)
        assert each.answer.finish is not None
        assert each.answer.finish.preemptions <= SMALL.max_preemptions + 1
    sim.check_clean()


def test_a_shared_prefix_is_computed_about_once() -> None:
    sim = Simulation(SMALL, pool_blocks=256)
    shared = prompt(0, 100)
    watched = [sim.submit([*shared, *prompt(i, 5)], 4) for i in range(1, 9)]
    sim.run_until_idle()
    computed = sum(w.answer.finish.computed_prompt_tokens for w in watched if w.answer.finish)
    assert computed <= 105 + 7 * (5 + SMALL.block_tokens)
    for each in watched:
        check_gold(SMALL, each)
    sim.check_clean()


def test_a_wholly_cached_prompt_computes_one_token() -> None:
    for extra in (-1, 0, 1):
        sim = Simulation(SMALL, pool_blocks=64)
        ids = prompt(5, 5 * SMALL.block_tokens + extra)
        for turn in range(3):
            watched = sim.submit(ids, 6)
            sim.run_until_idle()
            check_gold(SMALL, watched)
            finish = watched.answer.finish
            assert finish is not None
            if turn:
                full = len(ids) // SMALL.block_tokens * SMALL.block_tokens
                assert finish.cached_device_tokens == min(full, len(ids) - 1)
                assert finish.computed_prompt_tokens == len(ids) - finish.cached_device_tokens
        follow = sim.submit([*ids, *watched.answer.token_ids, 7], 3)
        sim.run_until_idle()
        check_gold(SMALL, follow)
        assert follow.answer.finish is not None
        had = len(ids) + 6 - 1  # the last token is never written
        assert follow.answer.finish.cached_device_tokens == had // SMALL.block_tokens * SMALL.block_tokens


def test_different_salts_share_nothing() -> None:
    sim = Simulation(SMALL, pool_blocks=64)
    ids = prompt(1, 40)
    first = sim.submit(ids, 4, salt="a")
    sim.run_until_idle()
    other = sim.submit(ids, 4, salt="b")
    sim.run_until_idle()
    same = sim.submit(ids, 4, salt="a")
    sim.run_until_idle()
    assert [w.answer.finish.cached_device_tokens for w in (first, other, same) if w.answer.finish] == [0, 0, 39]


def test_stop_strings_and_stop_tokens_end_an_answer() -> None:
    sim = Simulation(SMALL, pool_blocks=64)
    plain = sim.submit(prompt(3, 10), 12)
    sim.run_until_idle()
    tokens = plain.answer.token_ids
    by_id = sim.submit(prompt(3, 10), 12, stop_token_ids=[tokens[5]])
    by_text = sim.submit(prompt(3, 10), 12, stop=[f"{tokens[7]} "])
    sim.run_until_idle()
    assert by_id.answer.token_ids == tokens[: tokens.index(tokens[5]) + 1]
    assert by_id.answer.finish is not None and by_id.answer.finish.reason is FinishReason.STOP
    assert by_id.answer.finish.stop_token_id == tokens[5]
    text = "".join(by_text.answer.texts)
    assert f"{tokens[7]} " not in text
    assert by_text.answer.finish is not None and by_text.answer.finish.stop_matched == f"{tokens[7]} "
    assert by_text.answer.token_ids == tokens[: len(by_text.answer.token_ids)]
    sim.check_clean()


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_with_aborts_deadlines_and_crashes(seed: int) -> None:
    """Mixes of lengths, shared prefixes, aborts, deadlines, a scheduler that is away, a cache that is restarted."""
    rng = random.Random(seed)
    settings = Settings(
        max_step_tokens=rng.choice([16, 48, 128]),
        max_rows=rng.choice([2, 5, 16]),
        block_tokens=rng.choice([2, 4, 16]),
        context_tokens=512,
        chunk_cap_tokens=rng.choice([8, 16, 64]),
    )
    pool = rng.choice([160, 400]) // settings.block_tokens + 8
    sim = Simulation(settings, pool)
    away_from, away_to = 200_000, 200_000 + rng.choice([0, 400_000, 3_000_000])
    sim.scheduler.away = lambda now: away_to if away_from <= now < away_to else now
    for _ in range(rng.randrange(3)):
        back = rng.choice([10_000, 500_000])
        sim.clock.at(rng.randrange(1_500_000), partial(crash, sim, back))
    stems = [prompt(100 + i, rng.randrange(1, 60)) for i in range(4)]
    for i in range(60):
        ids = [*rng.choice(stems), *prompt(1000 + i, rng.randrange(1, 40))]
        watched = sim.submit(
            ids,
            rng.randrange(1, 40),
            at_us=rng.randrange(1_500_000),
            deadline_us=rng.choice([0, 0, 0, 300_000]),
        )
        if rng.random() < 0.2:
            sim.abort(watched, rng.randrange(2_000_000))
    sim.run_until_idle()
    assert sim.loop.counters.decisions > 0
    for each in sim.watched:
        finish = each.answer.finish
        assert finish is not None
        expected = gold(settings, each)
        if finish.reason is FinishReason.LENGTH:
            assert each.answer.token_ids == expected
        else:
            assert finish.reason in (FinishReason.ABORTED, FinishReason.DEADLINE)
            assert each.answer.token_ids == expected[: len(each.answer.token_ids)]
    sim.check_clean()


def test_a_joiner_that_ends_while_the_cache_is_away() -> None:
    """Blocks that it was still promised by another request are nobody's to declare."""
    sim = Simulation(Settings(max_step_tokens=16, max_rows=8, block_tokens=4, chunk_cap_tokens=16), pool_blocks=64)
    owner = sim.submit(prompt(1, 120), 3)
    joiner = sim.submit(prompt(1, 120), 3, at_us=30_000)
    sim.clock.at(60_000, partial(crash, sim, 10_000))
    sim.abort(joiner, 65_000)
    sim.run_until_idle()
    assert joiner.request.events[0][1].startswith("arrived") and not joiner.answer.token_ids
    assert owner.answer.token_ids == gold(SMALL, owner)
    sim.check_clean()
