"""What a step's control path costs, across three processes, beside vLLM 0.33's in-process scheduler.

    python -m bench.decide [--quick] [--policies fcfs sjf] [--points 256,1000] [--rounds 5] [--steps 40]

Ours: the executor's loop with a model that takes no time, Decide over gRPC to a scheduler process, Apply over gRPC to a
cache process. `rtt` is from the snapshot's encoding to the decoded decision, `control` from one launch to the next:
everything. `decide` is the pure function alone, `echo` a bare gRPC round trip of the same bytes between two idle Python
processes. Theirs: `schedule()` and `update_from_output()` in one process, which
includes block accounting. Rounds of all take turns, under the same requests with the same turnover, on idle cores and
with a spinning process on each. Ratios are over the median of vLLM's step at the same point, under its fcfs or, for
the policy of that name, its priority order: the lower of the two is the reference for all. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.common import busy_cores, load_average, percentile
from bench.control_path import ControlPath
from bench.echo import echo_us
from bench.environments import NotToBeHad
from bench.live_loop import on_clients_loop, services
from bench.vllm import VllmSide
from executor_svc.decision_log import DecisionRecorder
from executor_svc.scheduler_client import DECIDE
from executor_svc.situation import Reads
from jitney.scheduler_codec import decode_snapshot
from jitney.serving.channels import channel
from scheduler_svc.decide import decide
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.policies.base import COMMON_WAITING_COLUMNS

POINTS = ((64, 0), (256, 1000), (256, 10_000), (1024, 10_000))
CORES = ("idle", "busy")
VLLM_POLICIES = ("fcfs", "priority")
RATE_POINT = (256, 1000)
SETTLE_STEPS = 12
SEED = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    points: Sequence[tuple[int, int]]
    policies: Sequence[str]
    cores: Sequence[str]
    rounds: int
    steps: int


@dataclass(slots=True)
class Times:
    """Microseconds of one policy at one point."""

    decide: list[float] = field(default_factory=list)
    rtt: list[float] = field(default_factory=list)
    control: list[float] = field(default_factory=list)
    echo: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of one policy at one point."""

    policy: str
    running: int
    waiting: int
    cores: str
    decide_us_p50: float
    echo_ms: float
    rtt_us_p50: float
    rtt_us_p99: float
    control_us_p50: float
    vllm_us_p50: float | None
    rtt_ratio: float | None
    control_ratio: float | None


def reads_of(policy: str) -> Reads:
    """What the executor sends for a policy, as ListPolicies tells it."""
    kind = next(kind for kind in BUILT_IN.kinds if kind.name == policy)
    return Reads(frozenset((*COMMON_WAITING_COLUMNS, *kind.waiting_columns, "id")), frozenset(kind.tables))


def decide_us(snapshots: Sequence[bytes]) -> list[float]:
    """The pure function on decoded snapshots, in this process."""
    times = []
    for snapshot in [decode_snapshot(data) for data in snapshots]:
        started = time.perf_counter_ns()
        decide(snapshot)
        times.append((time.perf_counter_ns() - started) / 1e3)
    return times


class Sides:
    """vLLM under both of its orders, each in a process of its own; none if it is not to be had."""

    def __init__(self) -> None:
        self._sides: dict[str, VllmSide] = {}
        try:
            for policy in VLLM_POLICIES:
                self._sides[policy] = VllmSide()
            self.build(8, 0)
        except NotToBeHad as reason:
            self._leave(reason)

    def build(self, running: int, waiting: int) -> None:
        """A scheduler at that point."""
        try:
            for policy, side in self._sides.items():
                side.build(running, waiting, policy, SEED)
        except NotToBeHad as reason:
            self._leave(reason)

    def round(self, steps: int) -> dict[str, list[float]]:
        """Microseconds of the next steps of each."""
        try:
            return {policy: side.steps_us(steps) for policy, side in self._sides.items()}
        except NotToBeHad as reason:
            self._leave(reason)
            return {}

    def close(self) -> None:
        """Ends them."""
        for side in self._sides.values():
            side.close()
        self._sides = {}

    def _leave(self, reason: NotToBeHad) -> None:
        print(f"without vLLM, whose fields are null: {reason}", flush=True)
        self.close()


def measure(
    path: ControlPath, sides: Sides, echo: str, plan: Plan, cores: str
) -> tuple[dict[str, Times], float | None]:
    """All policies, the service at `echo` and vLLM in turns; vLLM's median."""
    ours: dict[str, Times] = {policy: Times() for policy in plan.policies}
    theirs: dict[str, list[float]] = defaultdict(list)
    with busy_cores() if cores == "busy" else contextlib.nullcontext():
        for _ in range(plan.rounds):
            for policy in plan.policies:
                path.follow(policy, reads_of(policy), SETTLE_STEPS)
                got = path.steps(plan.steps)
                ours[policy].rtt += got.rtt_us
                ours[policy].control += got.control_us
                ours[policy].decide += decide_us(path.snapshots())
                snapshot, decision = path.newest()
                ours[policy].echo += on_clients_loop(echo_us(echo, snapshot, len(decision), plan.steps))
            for order, times in sides.round(plan.steps).items():
                theirs[order] += times
    return ours, min(map(statistics.median, theirs.values())) if theirs else None


def point_of(policy: str, running: int, waiting: int, cores: str, times: Times, vllm: float | None) -> Point:
    """The figures out of the times."""
    rtt, control = percentile(times.rtt, 50), percentile(times.control, 50)
    return Point(
        policy=policy,
        running=running,
        waiting=waiting,
        cores=cores,
        decide_us_p50=round(percentile(times.decide, 50), 1),
        echo_ms=round(percentile(times.echo, 50) / 1e3, 3),
        rtt_us_p50=round(rtt, 1),
        rtt_us_p99=round(percentile(times.rtt, 99), 1),
        control_us_p50=round(control, 1),
        vllm_us_p50=round(vllm, 1) if vllm else None,
        rtt_ratio=round(rtt / vllm, 3) if vllm else None,
        control_ratio=round(control / vllm, 3) if vllm else None,
    )


def line_of(point: Point) -> str:
    """As the table has it."""
    times = (
        point.decide_us_p50,
        1e3 * point.echo_ms,
        point.rtt_us_p50,
        point.rtt_us_p99,
        point.control_us_p50,
        point.vllm_us_p50 or 0,
    )
    figures = " ".join(f"{us:8.0f}" for us in times)
    ratios = f"{point.rtt_ratio or 0:9.3f} {point.control_ratio or 0:12.3f}"
    return f"{point.policy:9} {point.running:7} {point.waiting:7} {point.cores:5} {figures} {ratios}"


def log_bytes_per_step(path: ControlPath, steps: int) -> float:
    """Of the decision log, fcfs, full frames among them; all tables are sent, as an executor that keeps a log does."""
    path.follow("fcfs", Reads(reads_of("fcfs").columns), SETTLE_STEPS)
    with tempfile.TemporaryDirectory(prefix="jitney-bench-log-") as folder:
        recorder = DecisionRecorder(Path(folder), 1 << 30)
        path.steps(steps, recorder.record)
        recorder.close()
        stats = recorder.stats()
    return stats.bytes_written / max(1, stats.frames)


async def decides_per_s(address: str, snapshot: bytes, streams: int = 4, seconds: float = 3.0) -> float:
    """What one replica decides in a second for several executors, each with one snapshot outstanding."""
    end = time.monotonic() + seconds
    link = channel(address)

    async def executor() -> int:
        count = 0
        call: Any = link.stream_stream(DECIDE)()
        while time.monotonic() < end:
            await call.write(snapshot)
            await call.read()
            count += 1
        await call.done_writing()
        return count

    started = time.monotonic()
    counts = await asyncio.gather(*(executor() for _ in range(streams)))
    took = time.monotonic() - started
    await link.close()
    return sum(counts) / took


def run(plan: Plan) -> Iterator[Point | dict[str, float]]:
    """Each point as it is measured, then the two figures of a replica and of the log."""
    sides = Sides()
    rate: dict[str, float] = {"decides_per_s_per_replica": 0.0, "log_bytes_per_step": 0.0}
    rate_point = RATE_POINT if RATE_POINT in plan.points else plan.points[0]
    try:
        with services("scheduler_svc", "cache_svc", "bench.echo") as (scheduler, cache, echo):
            for running, waiting in plan.points:
                sides.build(running, waiting)
                with ControlPath(scheduler.target, cache.target, running, waiting, SEED) as path:
                    path.fill()
                    for cores in plan.cores:
                        ours, vllm = measure(path, sides, echo.target, plan, cores)
                        for policy, times in ours.items():
                            yield point_of(policy, running, waiting, cores, times, vllm)
                    if (running, waiting) == rate_point:
                        rate["log_bytes_per_step"] = round(log_bytes_per_step(path, 4 * plan.steps), 1)
                        snapshot = path.snapshots()[-1]
                        rate["decides_per_s_per_replica"] = round(
                            on_clients_loop(decides_per_s(scheduler.target, snapshot)), 1
                        )
    finally:
        sides.close()
    yield rate


def plan_of(options: argparse.Namespace) -> Plan:
    """What the command line asks for."""
    rounds, steps = (2, 15) if options.quick else (options.rounds, options.steps)
    points = [tuple(map(int, point.split(","))) for point in options.points] or POINTS
    return Plan([(r, w) for r, w in points], options.policies, options.cores, rounds, steps)


def main() -> int:
    """Prints a line a point, and the JSON line."""
    names = [kind.name for kind in BUILT_IN.kinds]
    parser = argparse.ArgumentParser(prog="python -m bench.decide", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument("--policies", nargs="+", choices=names, default=names)
    parser.add_argument("--points", nargs="+", default=[], metavar="RUNNING,WAITING")
    parser.add_argument("--cores", nargs="+", choices=CORES, default=CORES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of each policy and of vLLM in a round")
    plan = plan_of(parser.parse_args())
    print(f"{plan.rounds} rounds of {plan.steps} steps; {load_average()} at the start; microseconds")
    print(
        "policy    running waiting cores   decide     echo      rtt  rtt p99  control     vLLM  rtt/vLLM control/vLLM"
    )
    points: list[Point] = []
    rate: dict[str, float] = {}
    for got in run(plan):
        if isinstance(got, Point):
            points.append(got)
            print(line_of(got), flush=True)
        else:
            rate = got
    print(f"{load_average()} at the end")
    print(json.dumps({"points": [asdict(point) for point in points], **rate}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
