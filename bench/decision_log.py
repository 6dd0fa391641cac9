"""What the decision log costs: bytes and CPU time a step, at 64 running and 1,000 waiting requests.

`python -m bench.decision_log [--running N] [--waiting N] [--steps N]`. The requests arrive, run and end on a virtual
clock under the real loop and `decide`; half of the steps see an arrival. CPU time is the writing thread's, whole:
taking messages apart, differences, deflate, checks, writing. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from jitney.log_segments import LogReader, LogWriter
from jitney.snapshot import Settings
from simulator.simulation import Simulation


def busy(running: int, waiting: int, steps: int, tenants: int = 100) -> list[tuple[bytes, bytes]]:
    """(snapshot, decision) of so many steps of an executor that is full and stays so."""
    rng = random.Random(3)
    settings = Settings(max_step_tokens=8 * running, max_rows=running, block_tokens=16, context_tokens=2048)
    sim = Simulation(settings, pool_blocks=20 * running)
    sim.cache.audits = False
    at_us = 1
    for number in range(running + waiting + steps // 2):
        prompt = rng.choices(range(1000), k=rng.randrange(20, 200))
        at_us += int(rng.expovariate(1 / 50_000)) if number > running + waiting else 0
        sim.submit(prompt, rng.randrange(20, 200), at_us=at_us, tenant=f"t{rng.randrange(tenants)}")
    sim.scheduler.log = []
    while len(sim.scheduler.log) < steps:
        sim.loop.tick()
    return sim.scheduler.log


def cost(pairs: list[tuple[bytes, bytes]]) -> dict[str, float]:
    """Bytes and CPU microseconds a step of writing these, and of reading them again; checks that they come back."""
    times = []
    with tempfile.TemporaryDirectory(prefix="jitney-bench-") as name:
        writer = LogWriter(Path(name), 1 << 30)
        for snapshot, decision in pairs:
            began_ns = time.thread_time_ns()
            writer.append(snapshot, decision, 700)
            times.append((time.thread_time_ns() - began_ns) / 1000)
        writer.close()
        began_ns = time.thread_time_ns()
        with LogReader(Path(name)) as reader:
            found = [(frame.snapshot, frame.decision) for frame in reader]
        read_us = (time.thread_time_ns() - began_ns) / 1000
    assert found == pairs
    return {
        "raw_bytes_per_step": round(sum(len(s) + len(d) for s, d in pairs) / len(pairs)),
        "log_bytes_per_step": round(writer.bytes_written / len(pairs), 1),
        "write_cpu_us_mean": round(sum(times) / len(times), 1),
        "write_cpu_us_p50": round(median(times), 1),
        "read_cpu_us_mean": round(read_us / len(pairs), 1),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    found = cost(busy(options.running, options.waiting, options.steps))
    print(json.dumps({"running": options.running, "waiting": options.waiting, **found}))


if __name__ == "__main__":
    main()
