"""Slow copies, evictions in the middle of loads, clients that go, answers that are lost, caches that crash: with lower
tiers nothing leaks and no token changes. Numbers as in docs/reported-faults.md."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cache_svc.disk_jobs import DiskJob
from executor_svc.live_request import State
from jitney.ticket_ops import LoadDone, StoreDone, TicketCall
from simulator.simulation import Simulation, Watched
from simulator.tiers import MB
from tests.support.tiered import check_tokens, loaded, prompt, tiered

STRAIN = 30  # milliseconds at most that a slow copy takes, before it begins


def come_back(sim: Simulation, sessions: int, rounds: int, gap_us: int = 60_000, tokens: int = 40) -> list[Watched]:
    """Sessions of a secret each, that return with it while short requests come between."""
    watched = []
    for turn in range(rounds):
        for number in range(sessions):
            at_us = gap_us * (turn * sessions + number)
            watched.append(sim.submit(prompt(number, tokens), 8, at_us=at_us))
            if number % 4 == 0:
                watched.append(sim.submit(prompt(10_000 + turn * sessions + number, 6), 4, at_us=at_us))
    return watched


def slowly(sim: Simulation, seed: int) -> None:
    """Every block that is copied waits first."""
    rand = random.Random(seed)
    assert sim.copies is not None
    for link in (sim.copies.out, sim.copies.into, sim.cache.disk.read, sim.cache.disk.write):
        link.delay_us = lambda: rand.randrange(1000 * STRAIN)


def ends_well(sim: Simulation, watched: list[Watched]) -> None:
    """All end, with their own tokens, and nothing is left."""
    sim.run_until_idle()
    check_tokens(watched)
    sim.check_clean()


def test_22_slow_copies_of_blocks_that_are_wanted_again() -> None:
    sim = tiered(30, cpu=150, log=False)
    slowly(sim, 1)
    ends_well(sim, come_back(sim, 10, 3))


def test_23_what_is_being_loaded_is_not_evicted_below() -> None:
    """The CPU tier holds a little less than all, so that each load is beside evictions."""
    sim = tiered(96, cpu=100, log=False)
    rand = random.Random(23)
    assert sim.copies is not None
    sim.copies.into.delay_us = lambda: rand.randrange(1000 * STRAIN)
    watched = come_back(sim, 16, 3)
    ends_well(sim, watched)
    assert sim.cache.lower.tiers.usage().cpu.evictions > 0


def test_15_every_session_gets_its_own_answer() -> None:
    """Working set four times the pool and one and a half times the CPU tier; the SSD has the rest."""
    sim = tiered(96, cpu=256, ssd=400, log=False)
    watched = come_back(sim, 32, 3)
    ends_well(sim, watched)
    assert sum(loaded(watched)) > 0


def test_24_a_disk_that_fails_only_costs_hits() -> None:
    sim = tiered(96, cpu=40, ssd=300, log=False)
    rand = random.Random(24)

    def fails(_: DiskJob) -> bool:
        return rand.random() < 0.3

    sim.cache.disk.fails = fails
    ends_well(sim, come_back(sim, 16, 3))


@pytest.mark.parametrize("rounds", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_34_clients_go_in_every_state(rounds: int) -> None:
    """Waiting, loading, standing by, swapped out, coming back, being stored: at any moment."""
    rand = random.Random(34)
    sim = tiered(24, cpu=80, ssd=80, copy=100 * MB, log=False)
    sim.cache.audits = rounds < 100
    slowly(sim, 34)
    for number in range(rounds):
        now_us = sim.clock.now_us()
        watched = [sim.submit(prompt(rand.randrange(6), 20), 16, at_us=now_us + 5_000 * i) for i in range(5)]
        for each in rand.sample(watched, 4):
            sim.abort(each, now_us + rand.randrange(1_000, 600_000))
        sim.run_until_idle()
        sim.watched.clear()
        if number % 20 == 0 or rounds < 100:
            sim.check_clean()
            check_tokens(watched)


def losing(*kinds: type[TicketCall]) -> Callable[[TicketCall], bool]:
    """Every third answer of a kind never arrives."""
    told = [0]

    def loses(call: TicketCall) -> bool:
        told[0] += isinstance(call, kinds)
        return isinstance(call, kinds) and told[0] % 3 == 0

    return loses


@pytest.mark.parametrize("kind", [StoreDone, LoadDone])
def test_answers_that_are_lost_come_with_the_next_stream(kind: type[TicketCall]) -> None:
    sim = tiered(48, cpu=150, ssd=100, log=False)
    sim.cache.loses = losing(kind)
    watched = come_back(sim, 12, 2)
    for at_us in range(300_000, 6_000_000, 300_000):
        sim.clock.at(at_us, sim.cache.break_stream)
    sim.run_until_idle()
    sim.cache.loses = lambda _: False
    sim.cache.break_stream()
    ends_well(sim, watched)


@pytest.mark.parametrize("seed", range(3))
def test_the_cache_crashes_while_copies_are_under_way(seed: int) -> None:
    rand = random.Random(seed)
    sim = tiered(48, cpu=100, ssd=200, copy=200 * MB, log=False)
    slowly(sim, seed)
    watched = come_back(sim, 12, 3)
    for _ in range(4):
        at_us = rand.randrange(200_000, 3_000_000)
        sim.clock.at(at_us, lambda: sim.cache.crash(back_after_us=20_000) if sim.cache.connected else None)
    ends_well(sim, watched)


def test_a_swapped_row_comes_back_though_nothing_else_is_told_to_the_cache() -> None:
    """Its blocks come free long after the last batch: the executor asks."""
    sim = tiered(24, cpu=64, log=False)
    assert sim.copies is not None
    sim.copies.out.delay_us = lambda: 100_000
    small, large = (sim.submit(prompt(number, tokens), 30) for number, tokens in enumerate((28, 60)))
    while not (large.request.state is State.WAITING and large.request.boardings):
        sim.loop.tick()
    sim.abort(small, sim.clock.now_us() + 30_000)
    sim.run_until_idle(60_000_000)
    ends_well(sim, [small, large])


def test_a_disk_that_hangs_holds_nobody_up_for_long() -> None:
    sim = tiered(40, cpu=20, ssd=200, log=False)
    for number in range(6):
        sim.submit(prompt(number, 60), 4, at_us=200_000 * number)
    sim.run_until_idle()
    sim.cache.disk.read.delay_us = lambda: 1 << 40
    again = [sim.submit(prompt(number, 60), 4) for number in range(4)]
    others = [sim.submit(prompt(50 + number, 30), 4) for number in range(3)]
    sim.run(sim.clock.now_us() + 30_000_000)
    check_tokens([*again, *others])
    waited = [each for each in again if any("of the SSD" in what for _, what in each.request.events)]
    assert waited and not any(each.request.lower_tokens[1] for each in waited)
