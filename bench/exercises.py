"""The worked examples of the field's textbook, computed by the simulator: as the textbook's executor, and as Jitney's.

    python -m bench.exercises

The textbook's executor computes a step, then decides, then computes the next; who arrives or ends between two decisions
waits for the next one. Jitney decides while a step computes, and tells a client at once. Both are the real loop, the
real `decide` and the real ledger on a virtual clock. The last line is JSON; the table before it has Jitney beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass

import numpy as np

from executor_svc.step_plan import StepPlan
from jitney.columns import RunningTable
from jitney.decision import PreemptionMode
from jitney.snapshot import Batching, Blocks, Rates, Settings, Snapshot, TierRoom
from scheduler_svc.decide import decide
from simulator.simulation import Simulation
from simulator.textbook import applied_us, textbook

POOL_BLOCKS = 8192
GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question with the textbook's answer and what Jitney does."""

    question: str
    textbook: float
    jitney: float
    unit: str


def executor(settings: Settings, step_us: int, decision_us: int, *, overlaps: bool) -> Simulation:
    """Jitney's executor, or the textbook's; every step takes `step_us`."""

    def step_time_us(_: StepPlan) -> int:
        return step_us

    if overlaps:
        simulation = Simulation(
            settings, POOL_BLOCKS, step_time_us=step_time_us, scheduler_latency_us=decision_us, cache_latency_us=0
        )
    else:
        simulation = textbook(settings, POOL_BLOCKS, step_time_us=step_time_us, decision_us=decision_us)
    simulation.cache.audits = False
    return simulation


def overhead_pct(step_us: int, decision_us: int, horizon: int, *, overlaps: bool) -> float:
    """What decisions add to the time of 8 rows that decode 200 tokens, in percent of the steps alone."""
    settings = Settings(horizon_steps=horizon, max_rows=8)
    simulation = executor(settings, step_us, decision_us, overlaps=overlaps)
    for row in range(8):
        simulation.submit([row + 1], 201)
    simulation.run_until_idle()
    launches = [record.at_us for record in simulation.loop.counters.steps]
    steps = (len(launches) - 1) // horizon * horizon
    return 100 * ((launches[steps] - launches[0]) / (steps * step_us) - 1)


@dataclass(frozen=True, slots=True)
class Waits:
    """Means in milliseconds: of a new request until its first step, of an ended one until its end is noticed, and what
    an answer takes without that."""

    new_ms: float
    ended_ms: float
    answer_ms: float


def waits(horizon: int, *, overlaps: bool) -> Waits:
    """Steps of 30 ms, a decision every `horizon` of them, which costs no time; 50 requests of about 250 tokens.

    They arrive at moments spread evenly over the time between two decisions of five steps, beside a request that never
    ends, and end in every one of five steps equally often.
    """
    step_us, window_us, count = 30_000, 150_000, 50
    simulation = executor(Settings(horizon_steps=horizon, max_rows=64), step_us, 0, overlaps=overlaps)
    simulation.submit([1], 2 * (250 + 5 * count))
    asked = []
    for i in range(count):
        moment = i * window_us + (2 * i + 1) * window_us // (2 * count)
        asked.append(simulation.submit([i + 2], 248 + i % 5, at_us=1 + moment))
    simulation.run_until_idle()
    noticed = [w.finished_us if overlaps else applied_us(simulation, w) for w in asked]
    return Waits(
        new_ms=statistics.fmean(w.request.first_row_us - w.arrived_us for w in asked) / 1e3,
        ended_ms=statistics.fmean(n - w.finished_us for n, w in zip(noticed, asked, strict=True)) / 1e3,
        answer_ms=statistics.fmean(w.finished_us - w.request.first_row_us for w in asked) / 1e3,
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """When the short and the long requests of a batch have their answers, and rows that were computed for nothing."""

    short_ms: float
    long_ms: float
    idle_pct: float


def batch(batching: Batching, *, overlaps: bool) -> Batch:
    """Nine requests of 50 tokens and one of 500, steps of 20 ms, ten rows; all arrive at once.

    The textbook hands out the answers of a static batch when the whole batch has ended.
    """
    step_us = 20_000
    settings = Settings(batching=batching, max_rows=10)
    simulation = executor(settings, step_us, 0, overlaps=overlaps)
    asked = [simulation.submit([i + 1], 50 if i else 500) for i in range(10)]
    simulation.run_until_idle()
    ends = [w.finished_us - w.request.first_row_us for w in asked]
    if not overlaps and batching is not Batching.CONTINUOUS:
        ends = [max(ends)] * len(ends)
    computed = sum(record.rows for record in simulation.loop.counters.steps)
    return Batch(
        short_ms=statistics.fmean(ends[1:]) / 1e3,
        long_ms=ends[0] / 1e3,
        idle_pct=100 * (1 - simulation.loop.counters.generated_tokens / computed),
    )


@dataclass(frozen=True, slots=True)
class Preemption:
    """What `decide` reckons for a victim."""

    recompute_ms: float
    move_ms: float
    swaps: bool


def preemption(bytes_per_s: int, prompt: int = 1500, generated: int = 500, moved_bytes: int = GB) -> Preemption:
    """A row of so many tokens has to leave a full pool; `moved_bytes` of it are copied out, and in again, at that rate.

    Prefill runs at 4,000 tokens a second. Its unfinished last block is recomputed, and so is not moved.
    """
    size, known = 16, prompt + generated
    held = -(-known // size)
    rates = Rates(
        to_host_bytes_per_s=bytes_per_s,
        to_device_bytes_per_s=bytes_per_s,
        prefill_tokens_per_s=4000,
        block_bytes=moved_bytes // ((known - 1) // size),
    )
    running = RunningTable(
        id=np.array([1, 2], np.uint64),
        arrival_us=np.array([1, 2], np.int64),
        prompt_tokens=np.array([size, prompt], np.int32),
        generated_tokens=np.array([1, generated], np.int32),
        max_new_tokens=np.array([1000, 4000], np.int32),
        computed_tokens=np.array([size, known - 1], np.int32),
        held_blocks=np.array([1, held], np.int32),
        **{name: np.zeros(2, dtype) for name, dtype in _UNUSED.items()},
    )
    decision = decide(
        Snapshot(
            executor="exercise",
            incarnation=1,
            step=1,
            now_us=10,
            settings=Settings(block_tokens=size),
            blocks=Blocks(total=1 + held),
            cpu=TierRoom(free_blocks=1 << 20, pin_blocks=1 << 20),
            rates=rates,
            running=running,
        )
    )
    victim = decision.preempt
    assert victim.id.tolist() == [2], victim
    return Preemption(
        recompute_ms=int(victim.recompute_us[0]) / 1e3,
        move_ms=int(victim.move_us[0]) / 1e3,
        swaps=int(victim.mode[0]) == PreemptionMode.SWAP_CPU,
    )


_UNUSED = {
    "priority": np.int32,
    "tenant": np.uint32,
    "endpoint": np.uint32,
    "in_flight_tokens": np.int32,
    "shared_blocks": np.int32,
    "lower_blocks": np.int32,
    "preemptions": np.int32,
    "admitted_us": np.int64,
    "waits_for": np.uint64,
    "ttft_deadline_us": np.int64,
    "deadline_us": np.int64,
    "predicted_p50": np.int32,
    "predicted_p90": np.int32,
    "policy_a": np.int64,
    "policy_b": np.int64,
    "loading": np.uint8,
    "features": np.uint64,
}


def crossover_bytes_per_s() -> int:
    """The rate from which on `decide` swaps the row of 2,000 tokens and 1 GB instead of recomputing it."""
    low, high = GB // 10, 100 * GB
    while high - low > GB // 1000:
        middle = (low + high) // 2
        low, high = (low, middle) if preemption(middle).swaps else (middle, high)
    return high


def run() -> tuple[list[Exercise], dict[str, object]]:
    """All exercises, and the textbook's figures."""
    every = [overhead_pct(30_000, 1000, 1, overlaps=mode) for mode in (False, True)]
    fifth = [overhead_pct(30_000, 1000, 5, overlaps=mode) for mode in (False, True)]
    tenth = [overhead_pct(10_000, 1000, 1, overlaps=mode) for mode in (False, True)]
    book, ours = waits(5, overlaps=False), waits(1, overlaps=True)
    static, continuous = batch(Batching.STATIC_PADDED, overlaps=False), batch(Batching.CONTINUOUS, overlaps=False)
    now = batch(Batching.CONTINUOUS, overlaps=True)
    pcie4, pcie5, prompt_only = preemption(32 * GB), preemption(64 * GB), preemption(32 * GB, 1500, 1)
    crossover = crossover_bytes_per_s() / GB
    extra_pct = 100 * book.ended_ms / book.answer_ms
    table = [
        Exercise("step of 30 ms, decision of 1 ms at each: overhead", every[0], every[1], "%"),
        Exercise("the same, a decision every 5 steps", fifth[0], fifth[1], "%"),
        Exercise("step of 10 ms, decision of 1 ms at each", tenth[0], tenth[1], "%"),
        Exercise("decision every 5 steps (Jitney: 1): an ended request is noticed after", book.ended_ms, 0.0, "ms"),
        Exercise("the same, of the time of its 250 tokens", extra_pct, 0.0, "%"),
        Exercise("a new request's first step comes after", book.new_ms, ours.new_ms, "ms"),
        Exercise("50 tokens beside 500 in a static batch (Jitney: continuous)", static.short_ms, now.short_ms, "ms"),
        Exercise("50 tokens beside 500, continuous", continuous.short_ms, now.short_ms, "ms"),
        Exercise("500 tokens beside 50", static.long_ms, now.long_ms, "ms"),
        Exercise("nine of 50 and one of 500: rows computed for nothing", static.idle_pct, now.idle_pct, "%"),
        Exercise("recompute 2,000 tokens at 4,000 a second", pcie4.recompute_ms, pcie4.recompute_ms, "ms"),
        Exercise("the same, if only its prompt of 1,500 counted", prompt_only.recompute_ms, pcie4.recompute_ms, "ms"),
        Exercise("swap 1 GB out and in, PCIe 4.0 x16 (32 GB/s)", pcie4.move_ms, pcie4.move_ms, "ms"),
        Exercise("swap 1 GB out and in, PCIe 5.0 x16 (64 GB/s)", pcie5.move_ms, pcie5.move_ms, "ms"),
        Exercise("1 GB or 2,000 tokens: swap pays from", crossover, crossover, "GB/s"),
    ]
    return table, {
        "overhead_every_step_pct": round(every[0], 2),
        "overhead_every_5_pct": round(fifth[0], 2),
        "overhead_1ms_of_10ms_pct": round(tenth[0], 2),
        "extra_wait_ms": round(book.ended_ms, 1),
        "new_request_wait_ms": round(book.new_ms, 1),
        "extra_wait_pct": round(extra_pct, 2),
        "short_static_ms": round(static.short_ms),
        "short_continuous_ms": round(continuous.short_ms),
        "long_ms": round(static.long_ms),
        "tail_idle_pct": round(static.idle_pct, 1),
        "recompute_2000_tokens_ms": round(pcie4.recompute_ms),
        "swap_1gb_ms": {"pcie4": round(pcie4.move_ms, 2), "pcie5": round(pcie5.move_ms, 2)},
    }


def main() -> int:
    """Prints the table and the JSON line."""
    table, figures = run()
    print(f"{'':70}{'textbook':>12}{'Jitney':>12}")
    for row in table:
        print(f"{row.question:70}{row.textbook:12.2f}{row.jitney:12.2f} {row.unit}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
