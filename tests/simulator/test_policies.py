"""Policies in the real loop: shares of tenants, short answers first, deadlines met; the same tokens under all."""

from __future__ import annotations

import random

import pytest

from executor_svc.request import FinishReason
from executor_svc.tenants import TenantLimits, Tenants
from jitney.snapshot import Rates, Settings
from scheduler_svc.policies import BUILT_IN
from simulator.simulation import Simulation
from tests.support.gold import gold
from tests.support.policies import under

B = 4
SETTINGS = Settings(max_step_tokens=32, max_rows=4, block_tokens=B, context_tokens=512, chunk_cap_tokens=16)


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


@pytest.mark.parametrize("name", [kind.name for kind in BUILT_IN.kinds])
def test_every_policy_gives_the_same_tokens_and_ends_everything(name: str) -> None:
    rates = Rates(prefill_tokens_per_s=10_000, step_base_ns=10_000_000, step_per_token_ns=100_000)
    sim = Simulation(SETTINGS, pool_blocks=40, policy=under(name), rates=rates)
    rand = random.Random(1)
    for i in range(24):
        sim.submit(
            prompt(i, rand.randrange(1, 80)),
            rand.randrange(1, 40),
            at_us=rand.randrange(1_000_000),
            priority=rand.randrange(-9, 9),
            tenant=f"t{i % 3}",
            deadline_us=rand.choice([0, 60_000_000]),
        )
    sim.run_until_idle()
    for watched in sim.watched:
        assert watched.answer.finish is not None and watched.answer.finish.reason is FinishReason.LENGTH
        assert watched.answer.finish.preemptions <= 2
    for watched in sim.watched[::6]:
        assert watched.answer.token_ids == gold(SETTINGS, watched)
    sim.check_clean()


def test_tables_go_to_the_policies_that_read_them() -> None:
    """A tenant with a quota is told to all: it holds whatever the policy reads."""
    sent = {}
    for name in ("fcfs", "fair", "mlfq"):
        sim = Simulation(SETTINGS, pool_blocks=60, policy=under(name))
        sim.loop.situation.tenants = Tenants({"bound": TenantLimits(max_rows=1)})
        for i in range(12):
            sim.submit(prompt(i, 24), 8, tenant=("free", "bound")[i % 2])
        while sim.loop.counters.generated_tokens < 40:
            sim.loop.tick()
        last = sim.loop.last_snapshot
        assert last is not None
        sent[name] = [sim.loop.registry.tenants.name(int(n)) for n in last.tenants.tenant], last.histograms.rows
    assert sent == {"fcfs": (["bound"], 0), "fair": (["free", "bound"], 0), "mlfq": (["bound"], 2)}


def test_tenants_that_both_wait_are_served_alike() -> None:
    """The bound of the paper, on the counters of the loop: one tenant floods before the other comes."""
    sim = Simulation(SETTINGS, pool_blocks=60, policy=under("fair"))
    sim.cache.audits = False
    for i in range(60):
        sim.submit(prompt(i, 24), 12, tenant="greedy")
    for i in range(30):
        sim.submit(prompt(100 + i, 40), 6, tenant="modest", at_us=300_000)
    number = sim.loop.registry.tenants.number
    start = None
    gaps = []
    while not sim.idle:
        sim.loop.tick()
        waits = {r.submission.tenant for r in sim.loop.registry.waiting_requests()}
        if len(waits) < 2:
            if start is not None:
                break
            continue
        one, two = (sim.loop.counters.of_tenant(number(name)) for name in ("greedy", "modest"))
        service = (one.prompt + 2 * one.generated, two.prompt + 2 * two.generated)
        start = start or service
        gaps.append((service[0] - start[0]) - (service[1] - start[1]))
    assert start is not None and len(gaps) > 200
    assert max(abs(gap) for gap in gaps) <= 2 * max(40, 2 * 60 * B) + 2 * (32 + 2 * 4)
    assert start[0] > 100


def test_short_answers_overtake_long_ones_without_being_known() -> None:
    """mlfq: requests that turn out short end sooner than under fcfs, at the price of long ones."""
    means = {}
    for name in ("fcfs", "mlfq"):
        policy = under(name, quantum_1=10, quantum_2=20) if name == "mlfq" else under(name)
        sim = Simulation(SETTINGS, pool_blocks=200, policy=policy)
        sim.cache.audits = False
        long = [sim.submit(prompt(i, 12), 150) for i in range(8)]
        short = [sim.submit(prompt(100 + i, 12), 6, at_us=100_000 + i * 50_000) for i in range(20)]
        sim.run_until_idle()
        means[name] = sum(w.token_times_us[-1] - w.request.first_token_us for w in long) / len(long)
        waits = [w.token_times_us[-1] - (100_000 + i * 50_000) for i, w in enumerate(short)]
        means[name + " short"] = sum(waits) / len(waits)
    assert means["mlfq short"] < 0.3 * means["fcfs short"]
