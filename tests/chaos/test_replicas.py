"""Any scheduler replica can serve any step: a thousand steps, each sent to another one than the step before, one of
them freshly started every fiftieth step, are decided byte for byte as by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from jitney.snapshot import Settings
from simulator.simulation import Simulation
from tests.support.processes import service

STEPS = 1000
REPLICAS = 3
FRESH_EVERY = 50
Decide = Callable[[bytes], bytes]


@dataclass(slots=True)
class Replica:
    """A running scheduler process and the way to it."""

    life: ExitStack
    decide: Decide


def recorded(steps: int) -> list[tuple[bytes, bytes]]:
    """Snapshots of a busy executor, with arrivals, ends, preemptions and prefix hits, and what one `decide` said."""
    rng = random.Random(7)
    settings = Settings(max_step_tokens=48, max_rows=10, block_tokens=4, context_tokens=512, chunk_cap_tokens=16)
    sim = Simulation(settings, pool_blocks=90)
    sim.cache.audits = False
    sim.scheduler.log = []
    stems = [rng.choices(range(1000), k=30) for _ in range(5)]
    while len(sim.scheduler.log) < steps:
        for _ in range(40):
            ids = [*rng.choice(stems), *rng.choices(range(1000), k=rng.randrange(1, 60))]
            sim.submit(ids, rng.randrange(1, 60), at_us=sim.clock.now_us() + rng.randrange(2_000_000))
        sim.run_until_idle()
    assert sim.loop.counters.preemptions
    return sim.scheduler.log[:steps]


def start(folder: Path) -> Replica:
    folder.mkdir()
    life = ExitStack()
    process = life.enter_context(service("scheduler_svc", folder=folder))
    channel = life.enter_context(grpc.insecure_channel(process.target))
    call: Any = channel.unary_unary("/jitney.scheduler.v1.Scheduler/DecideOnce")
    return Replica(life, lambda data: bytes(call(data, timeout=30)))


def test_a_thousand_steps_over_changing_replicas_decide_byte_equal(tmp_path: Path) -> None:
    log = recorded(STEPS)
    with ExitStack() as house:
        single = start(tmp_path / "single")
        house.push(single.life)
        replicas = [start(tmp_path / f"replica-{i}") for i in range(REPLICAS)]
        for replica in replicas:
            house.push(replica.life)
        for step, (shown, decided) in enumerate(log):
            at = step % REPLICAS
            if step % FRESH_EVERY == FRESH_EVERY - 1:
                replicas[at].life.close()
                replicas[at] = start(tmp_path / f"fresh-{step}")
                house.push(replicas[at].life)
            there = replicas[at].decide(shown)
            assert there == single.decide(shown) == decided, step
