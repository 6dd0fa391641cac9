"""Several answers to one prompt: rows of their own that share what they can, each with the tokens that it would have
alone. The model that counts gives another token for every wrong, stale or overwritten block; and at each step the
ledger itself is asked whether a block that is written has one holder."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as tries
from hypothesis import strategies as st

from executor_svc.live_request import LiveRequest, State
from executor_svc.moves import Victim
from executor_svc.planning import build_plan, fit
from executor_svc.request import FinishReason, Sampling
from executor_svc.step_plan import StepPlan
from jitney.snapshot import Batching, Settings
from simulator.model import default_step_time
from simulator.simulation import Simulation, Watched
from tests.support.gold import gold

B = 4
SMALL = Settings(max_step_tokens=64, max_rows=8, block_tokens=B, context_tokens=512, chunk_cap_tokens=32)
ROOMY = replace(SMALL, max_step_tokens=256, chunk_cap_tokens=64)
DRAWN = Sampling(temperature=1.0, seed=17)


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


class Watcher:
    """A simulation that holds each plan against the ledger, and remembers the copies of blocks."""

    def __init__(self, settings: Settings = SMALL, pool_blocks: int = 64) -> None:
        self.copies: list[tuple[int, int]] = []
        self.sim = Simulation(settings, pool_blocks, step_time_us=self._look)

    def _look(self, plan: StepPlan) -> int:
        self.copies += [(source, target) for source, target in plan.copies.tolist()]
        if self.sim.cache.connected and not self.sim.cache.unanswered:
            written = plan.write_slots[plan.write_slots >= 0] // B
            holders = np.array(self.sim.cache.ledger.blocks.holders)
            assert (holders[written] <= 1).all(), "a block of several holders is written"
        return default_step_time(plan)

    def choices(self, tokens: int, most: int, n: int, **more: object) -> list[Watched]:
        return self.sim.submit_choices(prompt(1, tokens), most, n, sampling=DRAWN, **more)  # type: ignore[arg-type]


@cache
def said(tokens: int, most: int, choice: int) -> list[int]:
    """What a choice of `Watcher.choices` says alone."""
    alone = Simulation(SMALL, 128)
    (watched,) = alone.submit_choices(prompt(1, tokens), most, 1, first_choice=choice, sampling=DRAWN)
    return gold(SMALL, watched)


def check(choices: list[Watched]) -> None:
    for choice, watched in enumerate(choices):
        asked = watched.request
        assert watched.answer.finish is not None
        assert watched.answer.token_ids == said(asked.prompt_tokens, asked.submission.max_tokens, choice)


def computed(watched: list[Watched]) -> int:
    return sum(w.answer.finish.computed_prompt_tokens for w in watched if w.answer.finish)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 37, 39, 40, 41])
@pytest.mark.parametrize("n", [2, 5])
def test_choices_share_the_prompt_and_its_partly_filled_block(tokens: int, n: int) -> None:
    watcher = Watcher(ROOMY)
    choices = watcher.choices(tokens, 11, n)
    watcher.sim.run_until_idle()
    check(choices)
    assert len({tuple(w.answer.token_ids) for w in choices}) == n
    assert computed(choices) == tokens + n - 1  # once, and its last token as a query for each other choice
    cached = [w.answer.finish.cached_device_tokens for w in choices if w.answer.finish]
    assert sorted(cached) == [0] + [tokens - 1] * (n - 1)
    assert len(watcher.copies) == (n - 1 if tokens % B else 0)  # all but the last holder get one
    assert len({source for source, _ in watcher.copies}) <= 1
    assert len({target for _, target in watcher.copies}) == len(watcher.copies)
    watcher.sim.check_clean()


def test_the_first_choice_is_the_answer_of_a_single_one() -> None:
    sim = Simulation(SMALL, pool_blocks=128)
    first = sim.submit_choices(prompt(1, 22), 9, 3, sampling=DRAWN)[0]
    single = sim.submit(prompt(1, 22), 9, sampling=DRAWN, at_us=10_000_000)
    sim.run_until_idle()
    assert first.answer.token_ids == single.answer.token_ids


def test_greedy_choices_are_alike() -> None:
    sim = Simulation(SMALL, pool_blocks=128)
    choices = sim.submit_choices(prompt(1, 22), 9, 3)
    sim.run_until_idle()
    assert [w.answer.token_ids for w in choices] == [gold(SMALL, choices[0])] * 3


def test_answers_of_one_token_need_no_copy() -> None:
    """Case 42 with n."""
    watcher = Watcher()
    choices = watcher.choices(22, 1, 5)
    watcher.sim.run_until_idle()
    check(choices)
    assert not watcher.copies
    watcher.sim.check_clean()


@pytest.mark.parametrize("most", [2, 3, 4])
def test_short_answers_and_stops(most: int) -> None:
    watcher = Watcher()
    stop = said(22, 4, 1)[1]
    choices = watcher.choices(22, most, 4, stop_token_ids=[stop])
    watcher.sim.run_until_idle()
    for choice, watched in enumerate(choices):
        whole, finish = said(22, most, choice), watched.answer.finish
        assert finish is not None
        if stop in whole:
            assert watched.answer.token_ids == whole[: whole.index(stop) + 1]
            assert finish.reason is FinishReason.STOP
        else:
            assert (watched.answer.token_ids, finish.reason) == (whole, FinishReason.LENGTH)
    watcher.sim.check_clean()


@pytest.mark.parametrize("batching", [Batching.STATIC_PADDED, Batching.STATIC_DROPPING])
def test_a_static_batch_gives_the_same_tokens(batching: Batching) -> None:
    """Ended rows stay as padding there; those that wait for such a one do not wait for its end."""
    watcher = Watcher(replace(ROOMY, batching=batching))
    first = said(22, 6, 0)[0]
    short = watcher.choices(22, 1, 3)
    stopped = watcher.choices(22, 6, 4, stop_token_ids=[first])
    watcher.sim.run_until_idle()
    check(short)
    assert stopped[0].answer.token_ids == [first]
    assert [w.answer.token_ids for w in stopped[1:] if first not in said(22, 6, w.request.submission.choice)] == [
        said(22, 6, choice) for choice in (1, 2, 3) if first not in said(22, 6, choice)
    ]
    watcher.sim.check_clean()


def test_more_choices_than_rows() -> None:
    watcher = Watcher(pool_blocks=128)
    choices = watcher.choices(30, 12, 3 * SMALL.max_rows)
    watcher.sim.run_until_idle()
    check(choices)
    watcher.sim.check_clean()


def test_a_prompt_that_fits_the_pool_once_serves_all_its_choices() -> None:
    watcher = Watcher(pool_blocks=16)
    choices = watcher.choices(50, 12, 4)
    watcher.sim.run_until_idle()
    check(choices)
    watcher.sim.check_clean()


def test_a_pool_too_small_for_all_choices_preempts_and_changes_none() -> None:
    watcher = Watcher(pool_blocks=24)
    choices = watcher.choices(22, 50, 6)
    watcher.sim.run_until_idle()
    check(choices)
    assert sum(w.answer.finish.preemptions for w in choices if w.answer.finish) > 0
    watcher.sim.check_clean()


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_one_choice_that_goes_away_at_any_moment_takes_no_other_with_it(victim: int) -> None:
    for at_us in range(500, 70_000, 1700):
        watcher = Watcher(ROOMY)
        choices = watcher.choices(42, 9, 4)
        watcher.sim.abort(choices[victim], at_us)
        watcher.sim.run_until_idle()
        gone = choices[victim].answer.token_ids
        assert gone == said(42, 9, victim)[: len(gone)]
        for choice, watched in enumerate(choices):
            assert choice == victim or watched.answer.token_ids == said(42, 9, choice)
        watcher.sim.check_clean()


def test_a_client_that_goes_away_at_any_moment_leaves_nothing() -> None:
    for at_us in range(500, 70_000, 1700):
        watcher = Watcher(ROOMY)
        for watched in watcher.choices(42, 9, 4):
            watcher.sim.abort(watched, at_us)
        watcher.sim.run_until_idle()
        watcher.sim.check_clean()


def moments(watcher: Watcher, rows: list[LiveRequest]) -> dict[str, Callable[[], bool]]:
    """What can be on its way when something breaks."""
    apply = watcher.sim.loop.apply
    whole = -(-rows[0].prompt_tokens // B)
    return {
        "a Share is on its way": lambda: any(sent.tails.sharings for sent in apply._sent),
        "a Share is answered": lambda: any(len(row.blocks) == whole for row in rows[1:]),
        "Forks are on their way": lambda: apply.tails.forking > 1,
        "a Fork is answered": lambda: watcher.sim.loop.blocks.forks_wait,
    }


MOMENTS = ["a Share is on its way", "a Share is answered", "Forks are on their way", "a Fork is answered"]


def reach(moment: str) -> tuple[Watcher, list[Watched]]:
    watcher = Watcher(ROOMY)
    choices = watcher.choices(42, 9, 4)
    reached = moments(watcher, [w.request for w in choices])[moment]
    while not reached():
        watcher.sim.loop.tick()
    return watcher, choices


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cache_killed_between_share_and_fork(moment: str) -> None:
    """The block is declared once, with all its holders, and each still gets a copy before it writes."""
    watcher, choices = reach(moment)
    watcher.sim.cache.crash(30_000)
    watcher.sim.run_until_idle()
    assert watcher.sim.loop.counters.cache_reopenings == 1
    check(choices)
    watcher.sim.check_clean()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", range(4))
def test_a_choice_preempted_between_share_and_fork(moment: str, victim: int) -> None:
    watcher, choices = reach(moment)
    loop, row = watcher.sim.loop, choices[victim].request
    loop.apply.preempt(Victim(row), [])
    watcher.sim.run_until_idle()
    assert row.answer.finish is not None and row.answer.finish.preemptions == 1
    check(choices)
    watcher.sim.check_clean()


def test_a_cache_killed_at_any_moment_changes_no_choice() -> None:
    for at_us in range(500, 70_000, 2300):
        watcher = Watcher()
        choices = watcher.choices(42, 9, 4)
        watcher.sim.clock.at(at_us, partial(crash, watcher.sim, 30_000))
        watcher.sim.run_until_idle()
        check(choices)
        watcher.sim.check_clean()


def test_a_scheduler_that_is_away_meanwhile() -> None:
    for at_us in range(1000, 70_000, 6000):
        watcher = Watcher(pool_blocks=40)
        end_us = at_us + 400_000
        watcher.sim.scheduler.away = lambda now, a=at_us, b=end_us: b if a <= now < b else now  # type: ignore[misc]
        choices = watcher.choices(42, 30, 4)
        watcher.sim.run_until_idle()
        check(choices)
        watcher.sim.check_clean()


def test_a_closed_block_is_written_by_no_plan() -> None:
    """Whatever a row is told to compute: it stops at the end of its prompt, and even a plan made past that check
    writes nothing into the block."""
    watcher, choices = reach("a Share is answered")
    loop = watcher.sim.loop
    heir = next(w.request for w in choices[1:] if len(w.request.blocks) == 11)
    slots = np.array([heir.slot])
    heir.length += 3
    loop.registry.generated_tokens[slots] += 3
    assert fit(loop.registry, loop.blocks, [heir], slots, np.array([4])).tolist() == [1]
    loop.registry.computed_tokens[slots] = heir.prompt_tokens
    assert fit(loop.registry, loop.blocks, [heir], slots, np.array([3])).tolist() == [0]
    plan = build_plan(loop.step + 1, loop.registry, loop.blocks, [heir], slots, np.array([2]))
    assert plan.write_slots.tolist() == [-1, -1]


def crash(sim: Simulation, back_after_us: int) -> None:
    if sim.cache.connected:
        sim.cache.crash(back_after_us)


def preempt(sim: Simulation, row: LiveRequest) -> None:
    if row.state is State.RUNNING:
        sim.loop.apply.preempt(Victim(row), [])


actions = st.lists(
    st.tuples(st.integers(500, 150_000), st.sampled_from(["abort", "crash", "preempt"]), st.integers(0, 100)),
    max_size=3,
)


@tries(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 45), st.integers(1, 14), st.integers(1, 6), st.integers(0, 80_000)),
        min_size=1,
        max_size=3,
    ),
    happens=actions,
    rows=st.sampled_from([2, 5, 12]),
    chunk=st.sampled_from([5, 64]),
    pool=st.sampled_from([16, 20, 60]),
)
def test_choices_in_any_company(
    groups: list[tuple[int, int, int, int]],
    happens: list[tuple[int, str, int]],
    rows: int,
    chunk: int,
    pool: int,
) -> None:
    watcher = Watcher(replace(SMALL, max_rows=rows, chunk_cap_tokens=chunk), pool)
    sim = watcher.sim
    asked = [watcher.choices(tokens, most, n, at_us=at_us) for tokens, most, n, at_us in groups]
    every = [watched for choices in asked for watched in choices]
    gone = set()
    for at_us, what, which in happens:
        watched = every[which % len(every)]
        if what == "abort":
            gone.add(watched.request.id)
            sim.abort(watched, at_us)
        elif what == "crash":
            sim.clock.at(at_us, partial(crash, sim, 20_000))
        else:
            sim.clock.at(at_us, partial(preempt, sim, watched.request))
    sim.run_until_idle()
    for (tokens, most, _, _), choices in zip(groups, asked, strict=True):
        for choice, watched in enumerate(choices):
            whole = said(tokens, most, choice)
            short = len(watched.answer.token_ids) if watched.request.id in gone else None
            assert watched.answer.token_ids == whole[:short]
    sim.check_clean()
