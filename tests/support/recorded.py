"""Decisions to record: what a simulated executor showed and what was decided."""

from __future__ import annotations

import functools
import random

from jitney.snapshot import Settings
from simulator.simulation import Simulation


@functools.cache
def recorded(steps: int = 400, seed: int = 7) -> tuple[tuple[bytes, bytes], ...]:
    """(snapshot, decision) of a busy executor: arrivals, ends, preemptions, prefix hits, several tenants."""
    rng = random.Random(seed)
    settings = Settings(max_step_tokens=48, max_rows=10, block_tokens=4, context_tokens=512, chunk_cap_tokens=16)
    sim = Simulation(settings, pool_blocks=90)
    sim.cache.audits = False
    sim.scheduler.log = []
    stems = [rng.choices(range(1000), k=30) for _ in range(5)]
    while len(sim.scheduler.log) < steps:
        for _ in range(40):
            ids = [*rng.choice(stems), *rng.choices(range(1000), k=rng.randrange(1, 60))]
            at_us = sim.clock.now_us() + rng.randrange(2_000_000)
            sim.submit(ids, rng.randrange(1, 60), at_us=at_us, tenant=f"t{rng.randrange(6)}")
        sim.run_until_idle()
    assert sim.loop.counters.preemptions
    return tuple(sim.scheduler.log[:steps])
