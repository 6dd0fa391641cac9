"""Lower tiers on the virtual clock: each way to preempt is right somewhere, loads pay, no token changes."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from executor_svc.ports import CopyRates
from jitney.columns import PrefetchColumns
from jitney.decision import Decision, PreemptionMode
from jitney.snapshot import Blocks, Snapshot
from simulator.scheduler import VirtualScheduler
from simulator.simulation import Simulation, Watched
from simulator.tiers import MB
from tests.support.tiered import SETTINGS, B, check_tokens, decisions, link, loaded, modes, prompt, tiered


def crowded(sim: Simulation) -> list[Watched]:
    """Six rows that outgrow a pool of 24 blocks."""
    watched = [sim.submit(prompt(i, 20), 40) for i in range(6)]
    sim.run_until_idle()
    check_tokens(watched)
    sim.check_clean()
    return watched


def test_each_way_to_preempt_is_right_somewhere() -> None:
    fast, slow = 1000 * MB, MB // 2
    assert _usual(tiered(24, cpu=100, copy=fast)) is PreemptionMode.SWAP_CPU
    assert _usual(tiered(24, cpu=100, copy=slow)) is PreemptionMode.RECOMPUTE
    assert _usual(tiered(24, ssd=100, copy=fast, disk=fast)) is PreemptionMode.SWAP_SSD
    assert _usual(tiered(24, ssd=100, copy=fast, disk=slow)) is PreemptionMode.RECOMPUTE


def _usual(sim: Simulation) -> PreemptionMode:
    return statistics.mode(modes(_after(sim)))


def _after(sim: Simulation) -> Simulation:
    crowded(sim)
    return sim


@pytest.mark.parametrize("cpu", [0, 100])
def test_what_a_victim_let_go_of_is_known_before_the_cache_has_answered(cpu: int) -> None:
    """So that nobody else has to leave for the same block, however late the answer comes."""
    sim = tiered(24, cpu=cpu)
    sim.cache.latency_us = 40_000  # several steps
    shown: list[Blocks] = []
    ask, poll = sim.scheduler.ask, sim.scheduler.poll
    victims = False

    def asking(snapshot: Snapshot) -> None:
        if victims:
            shown.append(snapshot.blocks)
        ask(snapshot)

    def polling() -> Decision | None:
        nonlocal victims
        decision = poll()
        if decision is not None:
            victims = decision.preempt.rows > 0
        return decision

    sim.scheduler.ask, sim.scheduler.poll = asking, polling  # type: ignore[method-assign]
    crowded(sim)
    assert shown
    assert all(blocks.free + blocks.evictable + blocks.leaving > 0 for blocks in shown), shown


def test_a_swapped_row_computes_only_its_last_block_again() -> None:
    swapped, recomputed = _after(tiered(24, cpu=100)), _after(tiered(24))
    assert swapped.copies is not None and swapped.copies.loaded_blocks > 0
    needed = 6 * (20 + 39)
    victims = len(modes(swapped))
    assert needed < swapped.loop.counters.computed_tokens <= needed + victims * (B + 1)
    assert recomputed.loop.counters.computed_tokens > swapped.loop.counters.computed_tokens


def test_ram_of_no_or_one_block_and_no_ssd_only_means_recomputing() -> None:
    """Case 30."""
    for cpu in (0, 1):
        sim = tiered(24, cpu=cpu)
        watched = [sim.submit(prompt(i, 20), 40) for i in range(8)]
        sim.run_until_idle()
        check_tokens(watched)
        sim.check_clean()
        assert modes(sim)


def sessions(sim: Simulation, count: int, rounds: int, tokens: int = 40, new: int = 8, gap_us: int = 60_000) -> Any:
    """Of twelve blocks each. Each comes back `rounds` times with the same prompt; all answers."""
    watched = [
        sim.submit(prompt(i, tokens), new, at_us=gap_us * (count * turn + i))
        for turn in range(rounds)
        for i in range(count)
    ]
    sim.run_until_idle()
    check_tokens(watched)
    sim.check_clean()
    return watched


def test_what_was_evicted_comes_back_from_the_cpu_tier_and_the_ssd() -> None:
    for cpu, ssd in ((400, 0), (0, 400), (60, 400)):
        sim = tiered(120, cpu=cpu, ssd=ssd)
        from_cpu, from_ssd = loaded(sessions(sim, 24, 3))
        assert from_cpu > 0 or not cpu
        assert (from_ssd > 0) == (ssd > 0)


def test_hits_that_are_reported_were_loaded() -> None:
    sim = tiered(120, cpu=400)
    watched = sessions(sim, 24, 3, tokens=41, gap_us=150_000)
    assert sim.copies is not None
    from_cpu, _ = loaded(watched)
    assert from_cpu == B * sim.copies.loaded_blocks == B * sim.cache.lower.tiers.usage().cpu.moved.hits > 0


def test_a_load_that_would_be_slower_is_skipped_and_counted() -> None:
    """Case 29."""
    sim = tiered(120, cpu=400)
    assert sim.copies is not None
    sim.copies.into = link(10 * MB)
    assert loaded(sessions(sim, 24, 2)) == (0, 0)
    sessions(sim, 24, 1, gap_us=0)  # all at once: they wait, and are looked up
    assert sum(decision.skipped_load_blocks for decision in decisions(sim)) > 0


class NoPrefetch(VirtualScheduler):
    """Decides as ever and asks for no prefetch."""

    def poll(self) -> Decision | None:
        """The decision, once."""
        decision = super().poll()
        return decision if decision is None else replace(decision, prefetch=PrefetchColumns())


def mean_ttft_us(*, prefetch: bool) -> float:
    """Of requests that wait in line for two rows, whose prompts are on the SSD."""
    settings = replace(SETTINGS, max_rows=2)
    sim = tiered(160, cpu=300, ssd=400, disk=150 * MB, settings=settings)
    if not prefetch:
        sim.scheduler = sim.loop.scheduler = NoPrefetch(sim.clock)
    first = [sim.submit(prompt(i, 80), 2, at_us=300_000 * i) for i in range(10)]
    sim.run_until_idle()
    sim.cache.crash(back_after_us=10_000)  # the SSD stays
    sim.run(sim.clock.now_us() + 200_000)
    begin_us = sim.clock.now_us()
    again = [sim.submit(prompt(i, 80), 20) for i in range(10)]
    sim.run_until_idle()
    check_tokens(first + again, settings)
    sim.check_clean()
    assert sum(loaded(again)) > 0 and sim.cache.disk.read_blocks > 0
    return float(np.mean([each.token_times_us[0] - begin_us for each in again]))


def test_prefetch_pays() -> None:
    assert mean_ttft_us(prefetch=True) < 0.9 * mean_ttft_us(prefetch=False)


def test_a_substitute_has_loaded_when_its_row_is_free() -> None:
    settings = replace(SETTINGS, max_rows=1)
    sim = tiered(120, cpu=400, copy=200 * MB, settings=settings)
    watched = [sim.submit(prompt(i, 40), 6, at_us=150_000 * i) for i in range(20)]
    sim.run_until_idle()
    again = [sim.submit(prompt(i, 40), 12) for i in range(20)]
    sim.run_until_idle()
    check_tokens(watched + again, settings)
    sim.check_clean()
    named = [decision.substitutes for decision in decisions(sim)]
    assert any(table.load_blocks.any() for table in named) and loaded(again)[0] > 0


@pytest.mark.parametrize("seed", range(3))
def test_rates_that_are_wrong_change_no_token(seed: int) -> None:
    sim = tiered(24, cpu=60, ssd=60)
    assert sim.copies is not None
    sim.copies.believed = lambda measured: CopyRates(10 ** (5 + 2 * seed), 10 ** (9 - 2 * seed), 1000 * seed)
    watched = [sim.submit(prompt(i % 5, 20 + i % 7), 30, at_us=40_000 * i) for i in range(20)]
    sim.run_until_idle()
    check_tokens(watched)
    sim.check_clean()


def test_what_others_computed_while_a_substitute_went_back_is_cached_for_it() -> None:
    rand = random.Random(11)
    settings = replace(SETTINGS, max_rows=rand.choice([1, 2]), max_step_tokens=16, chunk_cap_tokens=8)
    sim = tiered(40, cpu=40, settings=settings, log=False)
    watched = []
    for _ in range(12):
        wanted, most = prompt(1, 60)[: rand.choice([9, 20, 36, 50])], rand.randrange(1, 8)
        watched.append(sim.submit(wanted, most, at_us=rand.randrange(200_000), priority=rand.randrange(2)))
    for each in watched:
        if rand.random() < 0.3:
            sim.abort(each, rand.randrange(400_000))
    sim.run_until_idle()
    check_tokens(watched, settings)
    assert any("boarded again" in what for each in watched for _, what in each.request.events)
    sim.check_clean()
