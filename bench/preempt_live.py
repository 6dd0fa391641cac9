"""Time lost to preemption with the real executor, whose copies are throttled: the live half of bench/preempt.py.

All services run, around a random Llama of eleven million parameters. Each way to treat victims has services of its own,
and so has the pool that holds everything; all are there all the time. A round gives one load to one after the other,
so that what the machine does meanwhile falls upon all alike. To recompute always is to have no lower tier; to swap
always, `--lower-tiers always`. Everything that was cached is removed before each load, and one load that is not counted
teaches each executor its rates.

Whole loads differ by more than the ways do: what the machine does beside, and one victim more early on, is in the end
of every request. So ways are compared by what their rows lose, read off the decision logs (bench/preempt_lost.py); by
how much longer the loads took than with the pool that holds everything stands beside it.

How much copies are throttled, and how fast requests come, follows from what the machine does: SCENARIOS has the bytes
copied a second in parts of those that a prefill computes in a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.preempt_lost import RowTime, Watch
from jitney.client import AsyncClient, Options
from jitney.client.cache import AsyncCacheClient
from jitney.log_segments import LogReader
from jitney.scheduler_codec import decode_decision, decode_snapshot
from jitney.supervisor import ServeOptions, Supervisor
from tests.support.tiny_llama import make_tiny_llama

BLOCK_TOKENS = 16
LAYERS, HIDDEN, HEADS, VOCABULARY = 4, 512, 8, 512
BLOCK_BYTES = 2 * 2 * LAYERS * HIDDEN * BLOCK_TOKENS
ROWS, CHUNK = 8, 128
PROMPT, ANSWER = (64, 384), (48, 320)
ROOMY_BLOCKS, POOL_BLOCKS = 1024, 80
SCENARIOS = {"copies are fast": 4.0, "copies are slow": 0.1, "copies are even": 0.6}
BUSY = 1.25
"""Requests come so much faster than eight rows work them off."""
WAYS = ("rule", "recompute", "swap")
MIB = 1 << 20
STARTED_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """Of this machine: seconds of a prompt's token, and of one of eight answers' tokens."""

    prefill_s: float
    decode_s: float

    @property
    def prefill_mib_per_s(self) -> float:
        """What is computed."""
        return BLOCK_BYTES / BLOCK_TOKENS / self.prefill_s / MIB

    @property
    def each_s(self) -> float:
        """Between two requests."""
        return (statistics.fmean(PROMPT) * self.prefill_s + statistics.fmean(ANSWER) * self.decode_s) / BUSY


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a load."""

    at_s: float
    prompt: list[int]
    answer: int


class House:
    """The services of one way of preempting."""

    def __init__(
        self, folder: Path, model: Path, way: str, *, pool: int = POOL_BLOCKS, copy_mib_per_s: int = 0
    ) -> None:
        """`way` is one of WAYS; copies that are not limited are none: there is no lower tier."""
        folder.mkdir()
        self._log = folder / "decisions"
        self._spans_us: list[tuple[int, int]] = []  # of each load, by the clock of all processes
        cpu_bytes = 8 * POOL_BLOCKS * BLOCK_BYTES if copy_mib_per_s else 0
        self._services = Supervisor(
            ServeOptions(
                state_dir=folder / "state",
                grace_s=1.0,
                executor_args=(
                    f"--model={model}",
                    f"--cache-dir={folder.parent}",
                    "--threads=1",
                    f"--pool-blocks={pool}",
                    "--max-step-tokens=256",
                    f"--chunk-cap-tokens={CHUNK}",
                    f"--max-rows={ROWS}",
                    "--max-preemptions=8",
                    f"--copy-mib-per-s={copy_mib_per_s}",
                    f"--decision-log={self._log}",
                    f"--lower-tiers={'always' if way == 'swap' else 'measured'}",
                ),
                cache_args=(f"--cpu-bytes={cpu_bytes}", "--pin-permille=1000", "--audit-idle-s=0"),
            )
        )
        self.longer_s: list[float] = []  # of each round
        self.rows: list[RowTime] = []  # of each round, once it is stopped

    def start(self) -> None:
        """All serve."""
        self._services.start()

    def stop(self) -> None:
        """Ends all."""
        self._services.stop(at_once=True)

    async def run(self, load: Sequence[Asked]) -> float:
        """Seconds from arrival to end of all requests together. Nothing is cached at first."""
        async with AsyncClient(self._services.executor_target) as client:
            await self._forget(client)
            began, began_us = time.perf_counter(), time.monotonic_ns() // 1000

            async def each(asked: Asked) -> int:
                await asyncio.sleep(asked.at_s - (time.perf_counter() - began))
                done = await client.generate_once(asked.prompt, Options(max_tokens=asked.answer, ignore_eos=True))
                return done.finished.timings.total_us

            times_us = await asyncio.gather(*(each(asked) for asked in load))
        self._spans_us.append((began_us, time.monotonic_ns() // 1000))
        return sum(times_us) / 1e6

    def read(self, token_s: float) -> None:
        """Fills `rows` from the log of an executor that has stopped. `token_s`: of a prefill's token."""
        with LogReader(self._log) as log:
            frames = [(decode_snapshot(frame.snapshot), decode_decision(frame.decision)) for frame in log]
        for began_us, ended_us in self._spans_us[len(self._spans_us) - len(self.longer_s) :]:
            inside = [frame for frame in frames if began_us <= frame[0].now_us < ended_us]
            self.rows.append(Watch.over(inside, token_s))

    async def speed(self) -> Speed:
        """Of an executor that has nothing else to do."""
        prompt, answer, draw = 6 * CHUNK, 64, random.Random(0)
        alone = [Asked(0.0, drawn(draw, prompt), 1) for _ in range(4)]
        together = [Asked(0.0, drawn(draw, BLOCK_TOKENS), answer) for _ in range(ROWS)]
        prefills = [await self.run([asked]) for asked in alone]
        decodes = [await self.run(together) for _ in range(2)]
        return Speed(min(prefills) / prompt, min(decodes) / ROWS / (answer * ROWS))

    async def _forget(self, client: AsyncClient) -> None:
        async with AsyncCacheClient(self._services.cache_target) as cache:
            await cache.invalidate_model_version((await client.model_info()).version)


def drawn(draw: random.Random, tokens: int) -> list[int]:
    """A prompt."""
    return [draw.randrange(3, VOCABULARY) for _ in range(tokens)]


def load_of(seed: int, requests: int, each_s: float) -> list[Asked]:
    """So many requests at random times, one each `each_s` on average."""
    draw = random.Random(seed)
    return [
        Asked(draw.random() * requests * each_s, drawn(draw, draw.randint(*PROMPT)), draw.randint(*ANSWER))
        for _ in range(requests)
    ]


@dataclass(frozen=True, slots=True)
class Lost:
    """In one scenario, of each round by way: what rows lost, and seconds that the loads took longer."""

    scenario: str
    rows: dict[str, list[RowTime]]
    longer_s: dict[str, list[float]]

    def seconds(self, way: str) -> list[float]:
        """That rows lost in each round."""
        return [one.lost_s for one in self.rows[way]]

    @property
    def better(self) -> str:
        """Of the two other ways."""
        return min(WAYS[1:], key=lambda way: sum(self.seconds(way)))

    @property
    def ratio(self) -> float:
        """Of the rule to it."""
        return sum(self.seconds("rule")) / sum(self.seconds(self.better))

    @property
    def ratios(self) -> list[float]:
        """The same of each round."""
        return [rule / other for rule, other in zip(self.seconds("rule"), self.seconds(self.better), strict=True)]

    def figures(self) -> dict[str, object]:
        """For the JSON line."""
        return {
            "scenario": self.scenario,
            "better": self.better,
            "ratio": round(self.ratio, 3),
            "ratio_of_each_round": [round(ratio, 3) for ratio in self.ratios],
            "rows_lost_s": {way: [round(lost, 2) for lost in self.seconds(way)] for way in WAYS},
            "loads_longer_s": {way: [round(lost, 2) for lost in self.longer_s[way]] for way in WAYS},
        }


def run(loads: range, requests: int, only: str) -> list[Lost]:
    """Each scenario with `only` in its name; a round for each load."""
    names = [name for name in SCENARIOS if only in name]
    if not names or not loads:
        return []
    with tempfile.TemporaryDirectory(prefix="jitney-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = make_tiny_llama(
            folder / "model",
            vocab=VOCABULARY,
            layers=LAYERS,
            hidden=HIDDEN,
            heads=HEADS,
            kv_heads=HEADS,
            context=1024,
        )
        roomy = House(folder / "roomy", model, "recompute", pool=ROOMY_BLOCKS)
        stack.callback(roomy.stop)
        roomy.start()
        speed = asyncio.run(roomy.speed())
        print(
            f"prefill {speed.prefill_mib_per_s:.0f} MiB/s, an answer's token {1e6 * speed.decode_s:.0f} us, "
            f"a request each {1000 * speed.each_s:.0f} ms; seconds that rows lose by rule, recompute, swap "
            "(swaps of preemptions; each round; loads longer by)"
        )
        recompute = House(folder / "recompute", model, "recompute")
        houses = {name: {"recompute": recompute} for name in names}
        small = [recompute]
        for name in names:
            throttle = max(round(speed.prefill_mib_per_s * SCENARIOS[name]), 1)
            for way in ("rule", "swap"):
                houses[name][way] = House(folder / f"{way}-{throttle}", model, way, copy_mib_per_s=throttle)
                small.append(houses[name][way])
        for each in small:
            stack.callback(each.stop)
        with ThreadPoolExecutor(STARTED_AT_ONCE) as starting:
            list(starting.map(House.start, small))
        asyncio.run(_measure(roomy, small, loads, requests, speed.each_s))
        for each in small:
            each.stop()
            each.read(speed.prefill_s)
        return [_lost(name, houses[name]) for name in names]


async def _measure(roomy: House, small: list[House], loads: range, requests: int, each_s: float) -> None:
    """All loads, each of them to all houses."""
    lesson = [Asked(0.0, each.prompt, min(each.answer, ANSWER[1] // 2)) for each in load_of(-1, ROWS, each_s)]
    for each in small:
        await each.run(lesson)
    for number in loads:
        load = load_of(number, requests, each_s)
        order = small[number % len(small) :] + small[: number % len(small)]
        least = await roomy.run(load)
        for each in order:
            each.longer_s.append(await each.run(load) - least)


def _lost(name: str, houses: dict[str, House]) -> Lost:
    """Printed, too."""
    lost = Lost(name, {way: houses[way].rows for way in WAYS}, {way: houses[way].longer_s for way in WAYS})
    columns = []
    for way in WAYS:
        rows, each = lost.rows[way], " ".join(f"{one:.1f}" for one in lost.seconds(way))
        counts = f"{sum(one.swaps for one in rows)}/{sum(one.preemptions for one in rows)}"
        columns.append(f"{sum(lost.seconds(way)):7.2f} ({counts}; {each}; {sum(lost.longer_s[way]):.0f})")
    ranged = f"{lost.ratio:.3f} ({min(lost.ratios):.2f} to {max(lost.ratios):.2f})"
    print(f"{name:32} {' '.join(columns)}  ratio {ranged}", flush=True)
    return lost
