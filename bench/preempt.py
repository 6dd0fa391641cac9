"""Time lost to a pool that is too small: by the rule that compares costs, by always recomputing, by always swapping.

    python -m bench.preempt [--part simulated|live] [--only WORD] [--seeds 6] [--rounds 2] [--first-load 0]

Two parts: simulated, here, and live, with the real executor and throttled copies (bench/preempt_live.py). Simulated are
the real loop, `decide`, ledger and tiers on a virtual clock. Lost is what all requests of a load together take longer
from arrival to end than the same load takes with a pool that holds everything: victims, rows beside them, rows that
wait for blocks and requests that wait to board are all in it. What rows alone lose (bench/preempt_lost.py) stands
beside it. To recompute always is to have no lower tier; to swap always, `--lower-tiers always`.

The load: 64 requests of 64 to 384 tokens that ask for 48 to 320, two a second at random times, at most eight rows at
once; the pool holds about half of what eight such rows grow to. A step takes 10 ms and half a millisecond a token. In
most scenarios (bench/preempt_scenarios.py) the rates that the scheduler is told are not the true ones: half or double
of them, those of two seconds ago, or without the other traffic on the link.

The last line is JSON: of all scenarios of both parts the worst ratio to the better of the other two ways, that of the
scenarios in which neither way is right for all, the ratio of each simulated scenario with its standard error over the
loads, and what each live scenario lost. A single ratio that is off by less than two errors says nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum

from bench import preempt_live
from bench.common import load_average
from bench.preempt_live import Lost
from bench.preempt_lost import RowTime, Watch
from bench.preempt_scenarios import SCENARIOS, Scenario
from cache_svc.tiers import TierLimits
from executor_svc.step_plan import StepPlan
from jitney.decision import Decision
from jitney.snapshot import LowerTiers, Rates, Settings, Snapshot
from simulator.clock import VirtualClock
from simulator.scheduler import VirtualScheduler
from simulator.simulation import Simulation
from simulator.tiers import MB, Link, TierModel

SETTINGS = Settings(
    max_step_tokens=256, max_rows=8, block_tokens=16, context_tokens=4096, chunk_cap_tokens=128, max_preemptions=8
)
ROOMY_BLOCKS, POOL_BLOCKS = 2048, 112
REQUESTS, EACH_US = 64, 500_000
BASE_US, TOKEN_US = 10_000, 500


class Way(Enum):
    """What happens to a victim."""

    RULE = "rule"
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    completion_us: int  # of all requests together
    rows: RowTime


class Watched(VirtualScheduler):
    """The real `decide`; what it does to rows is added up."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.watch = Watch(TOKEN_US / 1e6)
        self._shown: Snapshot | None = None
        self._last: tuple[Snapshot, Decision] | None = None

    def ask(self, snapshot: Snapshot) -> None:
        """As ever."""
        self._shown = snapshot
        super().ask(snapshot)

    def poll(self) -> Decision | None:
        """The decision, once."""
        decision = super().poll()
        if decision is not None and self._shown is not None:
            if self._last is not None:
                self.watch.see(*self._last, self._shown.now_us - self._last[0].now_us)
            self._last = (self._shown, decision)
        return decision


def step_time_us(plan: StepPlan) -> int:
    """A step's base and its tokens."""
    return BASE_US + TOKEN_US * plan.tokens


def run(scenario: Scenario, way: Way, seed: int, pool_blocks: int = POOL_BLOCKS) -> Outcome:
    """One load, to its end."""
    links = [Link(int(scenario.copy(0)), measured=scenario.copy(0)) for _ in range(2)]
    tiers = TierModel(TierLimits(cpu_slots=8 * POOL_BLOCKS, pin_permille=1000), MB, *links)
    rates = Rates(
        prefill_tokens_per_s=int(1_000_000 / TOKEN_US * scenario.prefill),
        block_bytes=MB,
        step_base_ns=BASE_US * 1000,
        step_per_token_ns=TOKEN_US * 1000,
    )
    below = None if way is Way.RECOMPUTE else tiers
    settings = replace(SETTINGS, lower_tiers=LowerTiers.ALWAYS) if way is Way.SWAP else SETTINGS
    sim = Simulation(settings, pool_blocks, rates=rates, step_time_us=step_time_us, tiers=below)
    sim.cache.audits = False
    watched = sim.scheduler = sim.loop.scheduler = Watched(sim.clock)
    if sim.copies is not None:
        sim.copies.believed = lambda measured: scenario.believes(measured, sim.clock.now_us())

    def follow() -> None:
        for link in links:
            link.bytes_per_s = int(scenario.copy(sim.clock.now_us()))
        sim.clock.after(50_000, follow)

    follow()
    rand = random.Random(seed)
    requests = [
        sim.submit(
            [rand.randrange(1000) for _ in range(rand.randint(64, 384))],
            rand.randint(48, 320),
            at_us=rand.randrange(REQUESTS * EACH_US),
        )
        for _ in range(REQUESTS)
    ]
    sim.run_until_idle()
    return Outcome(sum(each.finished_us - each.arrived_us for each in requests), watched.watch.seen())


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of a sum over loads to another one, with the standard error that a jackknife over the loads gives."""

    value: float
    error: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """Of the same loads, in the same order."""
        whole, n = sum(ours) / sum(theirs), len(ours)
        without = [
            (sum(ours) - a) / (sum(theirs) - b) for a, b in zip(ours, theirs, strict=True) if sum(theirs) - b and n > 1
        ]
        if len(without) < 2:
            return cls(whole, 0.0)
        mean = statistics.fmean(without)
        return cls(whole, math.sqrt((n - 1) / n * sum((one - mean) ** 2 for one in without)))


@dataclass(frozen=True, slots=True)
class Compared:
    """The rule with the better of both other ways: by what the load took longer, and by what its rows lost."""

    scenario: Scenario
    load: Ratio
    rows: Ratio


def _run(number: int, way: Way, seed: int, pool_blocks: int) -> Outcome:
    return run(SCENARIOS[number], way, seed, pool_blocks)


def simulated(seeds: range, only: str, jobs: int) -> list[Compared]:
    """Each scenario with `only` in its name; runs that two scenarios share are made once."""
    print("simulated: seconds that loads take longer by rule, recompute, swap (their rows lose; swaps of preemptions)")
    with ProcessPoolExecutor(jobs) as pool:
        begun: dict[tuple[object, Way, int, int], Future[Outcome]] = {}

        def outcomes(number: int, way: Way, blocks: int = POOL_BLOCKS) -> list[Future[Outcome]]:
            what = {Way.RULE: SCENARIOS[number], Way.SWAP: SCENARIOS[number].copy, Way.RECOMPUTE: None}[way]
            for seed in seeds:
                if (what, way, seed, blocks) not in begun:
                    begun[what, way, seed, blocks] = pool.submit(_run, number, way, seed, blocks)
            return [begun[what, way, seed, blocks] for seed in seeds]

        numbers = [number for number, scenario in enumerate(SCENARIOS) if only in scenario.name]
        asked = [
            (SCENARIOS[number], outcomes(number, Way.RECOMPUTE, ROOMY_BLOCKS), [outcomes(number, way) for way in Way])
            for number in numbers
        ]
        return [_compared(scenario, _ended(roomy), list(map(_ended, ways))) for scenario, roomy, ways in asked]


def _ended(outcomes: Sequence[Future[Outcome]]) -> list[Outcome]:
    return [outcome.result() for outcome in outcomes]


def _compared(scenario: Scenario, roomy: Sequence[Outcome], ways: Sequence[Sequence[Outcome]]) -> Compared:
    """Printed, too. `ways` are rule, recompute and swap."""
    longer = [
        [(one.completion_us - least.completion_us) / 1e6 for one, least in zip(runs, roomy, strict=True)]
        for runs in ways
    ]
    rows = [[one.rows.lost_s for one in runs] for runs in ways]
    compared = Compared(scenario, *(Ratio.of(lost[0], min(lost[1:], key=sum)) for lost in (longer, rows)))
    columns = [
        f"{sum(lost):6.0f} ({sum(row_time):4.0f};"
        f" {sum(one.rows.swaps for one in runs)}/{sum(one.rows.preemptions for one in runs)})"
        for lost, row_time, runs in zip(longer, rows, ways, strict=True)
    ]
    print(
        f"{scenario.name:32} {' '.join(columns)}  ratio {compared.load.value:.3f} +- {compared.load.error:.3f}"
        f" (rows {compared.rows.value:.3f} +- {compared.rows.error:.3f})",
        flush=True,
    )
    return compared


def figures(found: Sequence[Compared], live: Sequence[Lost]) -> dict[str, object]:
    """The JSON line."""
    mixed = [one for one in found if one.scenario.mixed]
    worst = max(found, key=lambda one: one.load.value, default=None)
    parts = {
        "simulated": worst.load.value if worst else None,
        "live": max((one.ratio for one in live), default=None),
    }
    known = [value for value in parts.values() if value is not None]
    return {
        "worst_vs_better_of_both": round(max(known), 3) if known else None,
        "mixed_vs_better_of_both": round(statistics.fmean(one.load.value for one in mixed), 3) if mixed else None,
        "worst": {part: None if value is None else round(value, 3) for part, value in parts.items()},
        "simulated": {
            one.scenario.name: {
                "ratio": round(one.load.value, 3),
                "error": round(one.load.error, 3),
                "rows_ratio": round(one.rows.value, 3),
                "rows_error": round(one.rows.error, 3),
            }
            for one in found
        },
        "live": [one.figures() for one in live],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a scenario and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.preempt", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--part", choices=("simulated", "live"), help="absent: both")
    parser.add_argument("--only", default="", help="scenarios with this in their name")
    parser.add_argument("--seeds", type=int, default=6, help="simulated loads a scenario")
    parser.add_argument("--first-seed", type=int, default=0, help="number of the first simulated load")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="simulated loads at a time")
    parser.add_argument("--rounds", type=int, default=2, help="live loads a scenario")
    parser.add_argument("--first-load", type=int, default=0, help="number of the first live load")
    parser.add_argument("--requests", type=int, default=24, help="of a live load")
    options = parser.parse_args(argv)
    print(load_average())
    found: list[Compared] = []
    live: list[Lost] = []
    if options.part != "live":
        found = simulated(range(options.first_seed, options.first_seed + options.seeds), options.only, options.jobs)
    if options.part != "simulated":
        loads = range(options.first_load, options.first_load + options.rounds)
        live = preempt_live.run(loads, options.requests, options.only)
    print(json.dumps(figures(found, live)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
