"""Time lost to preemption: by the rule that compares costs, by always recomputing, by always swapping.

    python -m bench.preempt [--seeds 3]

The real loop, `decide`, ledger and tiers on a virtual clock, with a pool that is too small for the rows that run. In
most scenarios the rates that the scheduler is told are not the true ones: half or double of them, those of some time
ago, or without the other traffic on the link. Lost is, for each preempted request, the time from boarding again to its
next token; for each row beside it, the time by which the tokens that it computes again make the steps longer; and for
each row that sits out because blocks are still being copied away, the time that it sits. The table also shows what the
mean request took from arrival to end. The last line is JSON: of all scenarios the worst ratio to the better of the
other two ways, and that of the scenario in which neither way is right for all.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from cache_svc.tiers import TierLimits
from executor_svc.ports import CopyRates
from executor_svc.step_plan import StepPlan
from jitney.decision import Decision
from jitney.snapshot import Rates, Settings, Snapshot, TierRoom
from simulator.clock import VirtualClock
from simulator.scheduler import VirtualScheduler
from simulator.simulation import Simulation, Watched
from simulator.tiers import MB, Link, TierModel

SETTINGS = Settings(
    max_step_tokens=256, max_rows=8, block_tokens=16, context_tokens=4096, chunk_cap_tokens=128, max_preemptions=8
)
POOL_BLOCKS = 120
BASE_US, TOKEN_US = 10_000, 500
EVEN = 120 * MB
"""Bytes per second at which about as much is lost by moving a block out and in again as by computing its 16 tokens in a
step of eight rows."""
LAG_US = 2_000_000


class Way(Enum):
    """What happens to a victim."""

    RULE = "rule"
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Scenario:
    """`copy` are the true bytes per second at a time; `believes` makes of the rates measured those that are told."""

    name: str
    copy: Callable[[int], float] = lambda now_us: EVEN
    believes: Callable[[CopyRates, int], CopyRates] = lambda rates, now_us: rates
    prefill: float = 1.0  # what is believed of the prefill rate, in parts of the truth
    prompts: tuple[int, ...] = (96, 256)
    outputs: tuple[int, ...] = (60, 180)
    context_ps: int = 0  # per token of context that a row reads in a step
    mixed: bool = False


@dataclass(slots=True)
class Lost:
    """Of one run, in microseconds."""

    preemptions: int
    swaps: int
    victims_us: int
    others_us: int
    sat_out_us: int
    completion_us: float

    @property
    def us(self) -> int:
        """All."""
        return self.victims_us + self.others_us + self.sat_out_us


class Told(VirtualScheduler):
    """The real `decide`, which is shown a world in which there is only one way, or both; notes what happens."""

    def __init__(self, clock: VirtualClock, way: Way) -> None:
        super().__init__(clock)
        self._way = way
        self._shown: deque[Snapshot] = deque(maxlen=2)
        self._preempted: set[int] = set()
        self.boarded: list[tuple[int, int]] = []  # (request, when) of those that had been preempted
        self._recovering: dict[int, int] = {}  # tokens that a row had when it was preempted
        self.preemptions = self.swaps = self.others_us = self.sat_out_us = 0
        self._idle_rows = self._since_us = 0

    def ask(self, snapshot: Snapshot) -> None:
        """Answers after the latency."""
        if self._way is Way.RECOMPUTE:
            none = np.zeros(snapshot.candidates.rows, np.int32)
            without = replace(snapshot.candidates, cpu_hit_blocks=none, ssd_hit_blocks=none)
            snapshot = replace(snapshot, cpu=TierRoom(), ssd=TierRoom(), candidates=without)
        elif self._way is Way.SWAP:
            snapshot = replace(snapshot, rates=replace(snapshot.rates, prefill_tokens_per_s=1))
        self._shown.append(snapshot)
        super().ask(snapshot)

    def poll(self) -> Decision | None:
        """The decision, once."""
        decision = super().poll()
        if decision is not None:
            self._note(self._shown[-1], decision)
        return decision

    def _note(self, snapshot: Snapshot, decision: Decision) -> None:
        now_us = snapshot.now_us
        self.sat_out_us += self._idle_rows * (now_us - self._since_us)
        table = snapshot.running
        could = (table.loading == 0) & (table.waits_for == 0)
        runs = np.isin(table.id, np.concatenate((decision.run.id, decision.preempt.id)))
        self._idle_rows, self._since_us = int((could & ~runs).sum()), now_us
        self.preemptions += decision.preempt.rows
        self.swaps += int((decision.preempt.mode > 1).sum())
        self._preempted |= set(decision.preempt.id.tolist())
        had = dict(zip(table.id.tolist(), table.generated_tokens.tolist(), strict=True))
        for request, tokens in zip(decision.run.id.tolist(), decision.run.tokens.tolist(), strict=True):
            if had[request] > self._recovering.get(request, 1 << 30):
                del self._recovering[request]
            elif request in self._recovering:
                self.others_us += TOKEN_US * tokens * (decision.run.rows + decision.admit.rows - 1)
        for request, tokens in zip(decision.admit.id.tolist(), decision.admit.tokens.tolist(), strict=True):
            if request in self._recovering:
                self.others_us += TOKEN_US * tokens * (decision.run.rows + decision.admit.rows - 1)
        self._recovering |= {request: had[request] for request in decision.preempt.id.tolist()}
        self.boarded += [(request, now_us) for request in decision.admit.id.tolist() if request in self._preempted]


def run(scenario: Scenario, way: Way, seed: int) -> Lost:
    """One load, to its end."""
    rand = random.Random(seed)
    links = [Link(int(scenario.copy(0)), measured=scenario.copy(0)) for _ in range(2)]
    tiers = TierModel(TierLimits(cpu_slots=4 * POOL_BLOCKS, pin_permille=1000), MB, *links)
    rates = Rates(
        prefill_tokens_per_s=int(1_000_000 / TOKEN_US * scenario.prefill),
        block_bytes=MB,
        step_base_ns=BASE_US * 1000,
        step_per_token_ns=TOKEN_US * 1000,
        step_per_context_token_ps=scenario.context_ps,
    )

    def step_time_us(plan: StepPlan) -> int:
        context = int(plan.context_tokens.sum()) * scenario.context_ps // 1_000_000
        return BASE_US + TOKEN_US * plan.tokens + context

    sim = Simulation(SETTINGS, POOL_BLOCKS, rates=rates, step_time_us=step_time_us, tiers=tiers)
    sim.cache.audits = False
    told = sim.scheduler = sim.loop.scheduler = Told(sim.clock, way)
    assert sim.copies is not None
    sim.copies.believed = lambda measured: scenario.believes(measured, sim.clock.now_us())

    def follow() -> None:
        for link in links:
            link.bytes_per_s = int(scenario.copy(sim.clock.now_us()))
        sim.clock.after(50_000, follow)

    follow()
    watched = [
        sim.submit(
            [rand.randrange(1000) for _ in range(rand.choice(scenario.prompts))],
            rand.choice(scenario.outputs),
            at_us=1_000_000 * number // 4,
        )
        for number in range(32)
    ]
    sim.run_until_idle()
    return Lost(
        told.preemptions,
        told.swaps,
        sum(_set_back_us(watched, told.boarded)),
        told.others_us,
        told.sat_out_us,
        statistics.fmean(each.finished_us - each.arrived_us for each in watched),
    )


def _set_back_us(watched: Sequence[Watched], boarded: Sequence[tuple[int, int]]) -> list[int]:
    """Of each preempted request that got its row again, the time to its next token."""
    found: dict[tuple[int, int], int] = {}  # by request and token: of several attempts to board the last one counts
    for request, at_us in boarded:
        times = watched[request - 1].token_times_us
        token = bisect.bisect_right(times, at_us)
        if token < len(times):
            found[request, token] = times[token] - at_us
    return list(found.values())


def _scaled(factor: float) -> Callable[[CopyRates, int], CopyRates]:
    def believes(rates: CopyRates, _: int) -> CopyRates:
        return CopyRates(
            int(rates.to_host_bytes_per_s * factor),
            int(rates.to_device_bytes_per_s * factor),
            int(rates.queue_us / factor),
        )

    return believes


def _of_the_past(copy: Callable[[int], float]) -> Callable[[CopyRates, int], CopyRates]:
    def believes(rates: CopyRates, now_us: int) -> CopyRates:
        rate = copy(max(now_us - LAG_US, 0))
        return CopyRates(int(rate), int(rate), rates.queue_us)

    return believes


def _in_turns(now_us: int) -> float:
    """Fast for five seconds, slow for five."""
    return 3 * EVEN if now_us // 5_000_000 % 2 == 0 else EVEN / 3


def _shared(now_us: int) -> float:
    """Half of the time others have most of the link."""
    return 2 * EVEN if now_us // 400_000 % 2 == 0 else EVEN / 2


SCENARIOS: Sequence[Scenario] = (
    Scenario("copies are fast", lambda now_us: 3 * EVEN),
    Scenario("copies are slow", lambda now_us: EVEN / 3),
    Scenario("fast, believed half", lambda now_us: 2 * EVEN, _scaled(0.5)),
    Scenario("slow, believed double", lambda now_us: EVEN / 2, _scaled(2.0)),
    Scenario("fast, prefill believed double", lambda now_us: 2 * EVEN, prefill=2.0),
    Scenario("slow, prefill believed half", lambda now_us: EVEN / 2, prefill=0.5),
    Scenario("in turns, told two seconds late", _in_turns, _of_the_past(_in_turns)),
    Scenario("others on the link", _shared, lambda rates, now_us: CopyRates(2 * EVEN, 2 * EVEN, rates.queue_us)),
    Scenario("in turns", _in_turns, _of_the_past(lambda now_us: _in_turns(now_us + LAG_US)), mixed=True),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a scenario and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.preempt", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=3, help="loads a scenario")
    options = parser.parse_args(argv)
    print("seconds lost by rule, recompute, swap (swaps of preemptions; mean seconds from arrival to end)")
    ratios: dict[str, float] = {}
    for scenario in SCENARIOS:
        found = {way: [run(scenario, way, seed) for seed in range(options.seeds)] for way in Way}
        lost = {way: sum(each.us for each in runs) / 1e6 for way, runs in found.items()}
        ratios[scenario.name] = lost[Way.RULE] / min(lost[Way.RECOMPUTE], lost[Way.SWAP])
        columns = [
            f"{lost[way]:6.2f} ({sum(e.swaps for e in runs)}/{sum(e.preemptions for e in runs)}; "
            f"{statistics.fmean(e.completion_us for e in runs) / 1e6:.2f})"
            for way, runs in found.items()
        ]
        print(f"{scenario.name:32} {' '.join(columns)}  ratio {ratios[scenario.name]:.3f}", flush=True)
    mixed = [ratios[scenario.name] for scenario in SCENARIOS if scenario.mixed]
    figures = {"worst_vs_better_of_both": max(ratios.values()), "mixed_vs_better_of_both": statistics.fmean(mixed)}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
