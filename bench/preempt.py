"""Time lost to a pool that is too small: by the rule that compares costs, by always recomputing, by always swapping.

    python -m bench.preempt [--part simulated|live] [--only WORD] [--seeds 3] [--rounds 3] [--first-load 0]

Two parts: simulated, here, and live, with the real executor and throttled copies (bench/preempt_live.py). Simulated are
the real loop, `decide`, ledger and tiers on a virtual clock. Lost is what all requests of a load together take longer
from arrival to end than the same load takes with a pool that holds everything: victims, rows beside them, rows that
wait for blocks and requests that wait to board are all in it. To recompute always is to have no lower tier; to swap
always, `--lower-tiers always`.

The load: 64 requests of 64 to 384 tokens that ask for 48 to 320, two a second at random times, at most eight rows at
once; the pool holds about half of what eight such rows grow to. A step takes 10 ms and half a millisecond a token. At
EVEN somewhat more is lost by always swapping than by always recomputing; fast copies are three times as fast, slow ones
a third. In most scenarios the rates that the scheduler is told are not the true ones: half or double of them, those of
two seconds ago, or without the other traffic on the link.

The last line is JSON: of all scenarios of both parts the worst ratio to the better of the other two ways, that of the
scenarios in which neither way is right for all, and what each live scenario lost.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from bench import preempt_live
from bench.common import load_average
from bench.preempt_live import Lost
from cache_svc.tiers import TierLimits
from executor_svc.ports import CopyRates
from executor_svc.step_plan import StepPlan
from jitney.decision import Decision
from jitney.snapshot import LowerTiers, Rates, Settings
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
EVEN = 25 * MB
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
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    preemptions: int
    swaps: int
    completion_us: int  # of all requests together


class Counting(VirtualScheduler):
    """The real `decide`; counts."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.preemptions = self.swaps = 0

    def poll(self) -> Decision | None:
        """The decision, once."""
        decision = super().poll()
        if decision is not None:
            self.preemptions += decision.preempt.rows
            self.swaps += int((decision.preempt.mode > 1).sum())
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
    counting = sim.scheduler = sim.loop.scheduler = Counting(sim.clock)
    if sim.copies is not None:
        sim.copies.believed = lambda measured: scenario.believes(measured, sim.clock.now_us())

    def follow() -> None:
        for link in links:
            link.bytes_per_s = int(scenario.copy(sim.clock.now_us()))
        sim.clock.after(50_000, follow)

    follow()
    rand = random.Random(seed)
    watched = [
        sim.submit(
            [rand.randrange(1000) for _ in range(rand.randint(64, 384))],
            rand.randint(48, 320),
            at_us=rand.randrange(REQUESTS * EACH_US),
        )
        for _ in range(REQUESTS)
    ]
    sim.run_until_idle()
    return Outcome(counting.preemptions, counting.swaps, sum(each.finished_us - each.arrived_us for each in watched))


def _scaled(factor: float) -> Callable[[CopyRates, int], CopyRates]:
    def believes(rates: CopyRates, _: int) -> CopyRates:
        return CopyRates(
            int(rates.to_host_bytes_per_s * factor),
            int(rates.to_device_bytes_per_s * factor),
            int(rates.queue_us / factor),
            int(rates.out_queue_us / factor),
        )

    return believes


def _of_the_past(copy: Callable[[int], float]) -> Callable[[CopyRates, int], CopyRates]:
    def believes(rates: CopyRates, now_us: int) -> CopyRates:
        rate = copy(max(now_us - LAG_US, 0))
        return CopyRates(int(rate), int(rate), rates.queue_us, rates.out_queue_us)

    return believes


def _fast(_: int) -> float:
    return 3 * EVEN


def _slow(_: int) -> float:
    return EVEN / 3


def _in_turns(now_us: int) -> float:
    """Fast for five seconds, slow for five."""
    return 3 * EVEN if now_us // 5_000_000 % 2 == 0 else EVEN / 3


def _shared(now_us: int) -> float:
    """Half of the time others have most of the link."""
    return 2 * EVEN if now_us // 400_000 % 2 == 0 else EVEN / 2


SCENARIOS: Sequence[Scenario] = (
    Scenario("copies are fast", _fast),
    Scenario("copies are slow", _slow),
    Scenario("copies are even"),
    Scenario("fast, believed half", _fast, _scaled(0.5)),
    Scenario("slow, believed double", _slow, _scaled(2.0)),
    Scenario("fast, prefill believed double", _fast, prefill=2.0),
    Scenario("slow, prefill believed half", _slow, prefill=0.5),
    Scenario("in turns, told two seconds late", _in_turns, _of_the_past(_in_turns)),
    Scenario(
        "others on the link",
        _shared,
        lambda rates, now_us: CopyRates(2 * EVEN, 2 * EVEN, rates.queue_us, rates.out_queue_us),
    ),
    Scenario("in turns", _in_turns, _of_the_past(lambda now_us: _in_turns(now_us + LAG_US)), mixed=True),
)


def simulated(loads: int, only: str) -> dict[str, float]:
    """The ratio of each scenario with `only` in its name."""
    print("simulated: seconds lost by rule, recompute, swap (swaps of preemptions)")
    ratios: dict[str, float] = {}
    seeds = range(loads)
    roomy = [run(SCENARIOS[0], Way.RECOMPUTE, seed, ROOMY_BLOCKS).completion_us for seed in seeds]
    recomputed = [run(SCENARIOS[0], Way.RECOMPUTE, seed) for seed in seeds]
    swapped: dict[Callable[[int], float], list[Outcome]] = {}
    for scenario in SCENARIOS:
        if only not in scenario.name:
            continue
        if scenario.copy not in swapped:
            swapped[scenario.copy] = [run(scenario, Way.SWAP, seed) for seed in seeds]
        ruled = [run(scenario, Way.RULE, seed) for seed in seeds]
        columns, lost = [], []
        for runs in (ruled, recomputed, swapped[scenario.copy]):
            each = [(one.completion_us - least) / 1e6 for one, least in zip(runs, roomy, strict=True)]
            lost.append(sum(each))
            counts = f"{sum(one.swaps for one in runs)}/{sum(one.preemptions for one in runs)}"
            columns.append(f"{lost[-1]:7.2f} ({counts}; {' '.join(f'{one:.1f}' for one in each)})")
        ratios[scenario.name] = lost[0] / min(lost[1:])
        print(f"{scenario.name:32} {' '.join(columns)}  ratio {ratios[scenario.name]:.3f}", flush=True)
    return ratios


def figures(ratios: dict[str, float], live: Sequence[Lost]) -> dict[str, object]:
    """The JSON line."""
    mixed = [ratios[scenario.name] for scenario in SCENARIOS if scenario.mixed and scenario.name in ratios]
    worst = {"simulated": max(ratios.values(), default=None), "live": max((one.ratio for one in live), default=None)}
    known = [value for value in worst.values() if value is not None]
    return {
        "worst_vs_better_of_both": round(max(known), 3) if known else None,
        "mixed_vs_better_of_both": round(statistics.fmean(mixed), 3) if mixed else None,
        "worst": {part: None if value is None else round(value, 3) for part, value in worst.items()},
        "live": [
            {
                "scenario": one.scenario,
                "better": one.better,
                "ratio": round(one.ratio, 3),
                "ratio_of_each_round": [round(ratio, 3) for ratio in one.ratios],
                "lost_s": {way: [round(lost, 2) for lost in seconds] for way, seconds in one.seconds.items()},
            }
            for one in live
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a scenario and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.preempt", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--part", choices=("simulated", "live"), help="absent: both")
    parser.add_argument("--only", default="", help="scenarios with this in their name")
    parser.add_argument("--seeds", type=int, default=3, help="simulated loads a scenario")
    parser.add_argument("--rounds", type=int, default=3, help="live loads a scenario")
    parser.add_argument("--first-load", type=int, default=0, help="number of the first live load")
    parser.add_argument("--requests", type=int, default=24, help="of a live load")
    options = parser.parse_args(argv)
    print(load_average())
    ratios: dict[str, float] = {}
    live: list[Lost] = []
    if options.part != "live":
        ratios = simulated(options.seeds, options.only)
    if options.part != "simulated":
        loads = range(options.first_load, options.first_load + options.rounds)
        live = preempt_live.run(loads, options.requests, options.only)
    print(json.dumps(figures(ratios, live)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
