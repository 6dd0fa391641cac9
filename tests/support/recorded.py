"""Decisions to record: what a simulated executor showed and what was decided."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from executor_svc.situation import Policy, Reads
from executor_svc.tenants import TenantLimits, Tenants
from jitney.decision_log import MAGIC, FrameEncoder
from jitney.snapshot import PolicyChoice, Settings
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.policies.base import COMMON_WAITING_COLUMNS
from simulator.simulation import Simulation

SETTINGS: Final = Settings(max_step_tokens=48, max_rows=10, block_tokens=4, context_tokens=512, chunk_cap_tokens=16)
POOL_BLOCKS: Final = 90
FCFS: Final = PolicyChoice()


@functools.cache
def recorded(
    steps: int = 400, seed: int = 7, choice: PolicyChoice = FCFS, settings: Settings = SETTINGS
) -> tuple[tuple[bytes, bytes], ...]:
    """(snapshot, decision) of a busy executor: arrivals in bursts, ends, preemptions, prefix hits, tenants of
    different weight, priorities, and deadlines for some."""
    rng = random.Random(seed)
    columns = frozenset({"id", "arrival_us", *COMMON_WAITING_COLUMNS, *BUILT_IN.choose(choice).waiting_columns})
    sim = Simulation(settings, POOL_BLOCKS, policy=Policy(choice, reads=Reads(columns)))
    sim.loop.situation.tenants = Tenants({"t0": TenantLimits(weight=2000), "t1": TenantLimits(max_rows=3)})
    sim.cache.audits = False
    sim.scheduler.log = []
    stems = [rng.choices(range(1000), k=30) for _ in range(5)]
    while len(sim.scheduler.log) < steps:
        for _ in range(40):
            late = rng.random() < 0.3
            sim.submit(
                [*rng.choice(stems), *rng.choices(range(1000), k=rng.randrange(1, 60))],
                rng.randrange(1, 60),
                at_us=sim.clock.now_us() + rng.randrange(2_000_000),
                tenant=f"t{rng.randrange(6)}",
                priority=rng.choice([0, 0, 0, 5, -5]),
                ttft_deadline_us=rng.randrange(100_000, 2_000_000) if late else 0,
                deadline_us=rng.randrange(300_000, 4_000_000) if late else 0,
            )
        sim.run_until_idle()
    return tuple(sim.scheduler.log[:steps])


def with_horizon(steps: int) -> Settings:
    """SETTINGS with decisions that hold for so many steps."""
    return replace(SETTINGS, horizon_steps=steps)


def write_segment(path: Path, pairs: Iterable[tuple[bytes, bytes]], round_trip_us: int = 700) -> None:
    """One segment with these frames."""
    encoder = FrameEncoder()
    records = [encoder.encode(snapshot, decision, round_trip_us) for snapshot, decision in pairs]
    path.write_bytes(MAGIC + b"".join(records))
