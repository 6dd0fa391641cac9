"""What `explain` tells of a request's past: when it boarded, why it was preempted, and what that cost, in numbers."""

from __future__ import annotations

import random

from jitney.snapshot import Rates, Settings
from simulator.simulation import Simulation


def test_a_preempted_request_knows_for_what_and_at_what_cost() -> None:
    rng = random.Random(3)
    settings = Settings(max_step_tokens=48, max_rows=8, block_tokens=4, context_tokens=512, chunk_cap_tokens=16)
    sim = Simulation(settings, pool_blocks=40, rates=Rates(prefill_tokens_per_s=10_000))
    for _ in range(12):
        sim.submit(rng.choices(range(1000), k=20), 40)
    sim.run_until_idle()
    assert sim.loop.counters.preemptions
    told = [[what for _, what in watched.request.events] for watched in sim.watched]
    assert all(events[0] == "arrived with 20 prompt tokens" for events in told)
    assert all(events[1].startswith("boarded with ") for events in told)
    preempted = [events for events in told if any("preempted (recompute)" in what for what in events)]
    assert preempted
    for events in preempted:
        at = next(i for i, what in enumerate(events) if "preempted" in what)
        assert "recomputing costs" in events[at] and " blocks" in events[at]
        assert events[at + 1].startswith("boarded again, ")
