"""Simulations with lower tiers, and what is looked at in them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from cache_svc.tiers import TierLimits
from executor_svc.step_plan import StepPlan
from jitney.decision import Decision, PreemptionMode
from jitney.scheduler_codec import decode_decision
from jitney.snapshot import Rates, Settings
from simulator.simulation import Simulation, Watched
from simulator.tiers import MB, Link, TierModel
from tests.support.gold import gold

B = 4
SETTINGS = Settings(max_step_tokens=64, max_rows=8, block_tokens=B, context_tokens=1024, chunk_cap_tokens=32)
PREFILL = 500
"""Tokens a second: a block of four in 8 ms."""


def step_time_us(plan: StepPlan) -> int:
    """10 ms, and 2 ms a token."""
    return 10_000 + 1_000_000 // PREFILL * plan.tokens


def link(bytes_per_s: int) -> Link:
    """As fast as that, and known to be."""
    return Link(bytes_per_s, measured=float(bytes_per_s))


def tiered(
    pool: int,
    cpu: int = 0,
    ssd: int = 0,
    *,
    copy: int = 1000 * MB,
    disk: int = 500 * MB,
    settings: Settings = SETTINGS,
    log: bool = True,
    queues: bool = False,
    **limits: Any,
) -> Simulation:
    """Blocks of 1 MB; `copy` and `disk` are bytes a second both ways."""
    if not cpu and ssd:
        limits = {"staging_slots": 8} | limits
    sizes = TierLimits(cpu_slots=cpu + limits.get("staging_slots", 0), ssd_slots=ssd, **limits)
    model = TierModel(sizes, MB, link(copy), link(copy), link(disk), link(disk))
    rates = Rates(prefill_tokens_per_s=PREFILL)
    sim = Simulation(settings, pool, rates=rates, step_time_us=step_time_us, tiers=model, queues=queues)
    sim.scheduler.log = [] if log else None
    return sim


def prompt(seed: int, tokens: int) -> list[int]:
    """Distinct for each seed."""
    return random.Random(seed).choices(range(1000), k=tokens)


def decisions(sim: Simulation) -> list[Decision]:
    """All that were made."""
    assert sim.scheduler.log is not None
    return [decode_decision(decided) for _, decided in sim.scheduler.log]


def modes(sim: Simulation) -> list[PreemptionMode]:
    """How each victim was preempted."""
    return [PreemptionMode(mode) for decision in decisions(sim) for mode in decision.preempt.mode.tolist()]


def loaded(watched: Iterable[Watched]) -> tuple[int, int]:
    """Prompt tokens that requests had from the CPU tier and from the SSD when they first boarded."""
    ends = [each.answer.finish for each in watched]
    return sum(e.cached_cpu_tokens for e in ends if e), sum(e.cached_ssd_tokens for e in ends if e)


def check_tokens(watched: Iterable[Watched], settings: Settings = SETTINGS) -> None:
    """Every answer is what the request yields alone; of one that was cut short, the beginning of that. What its usage
    does not call cached was computed."""
    golds: dict[tuple[bytes, int], list[int]] = {}
    for each in watched:
        asked = each.request.submission
        key = (asked.prompt_ids.tobytes(), asked.max_tokens)
        if key not in golds:
            golds[key] = gold(settings, each)
        finish = each.answer.finish
        assert finish is not None
        got = each.answer.token_ids
        assert got == golds[key][: len(got)], f"request {each.request.id} after {len(got)} tokens"
        assert len(got) == len(golds[key]) or finish.reason.name == "ABORTED"
        cached = finish.cached_device_tokens + finish.cached_cpu_tokens + finish.cached_ssd_tokens
        assert not got or cached + finish.computed_prompt_tokens >= finish.prompt_tokens
