"""More work than the device holds, on real services: swaps to both tiers, slow copies, evictions during loads, and
clients that go away in every state. Numbers in names are those of docs/reported-faults.md."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitney.client import AsyncAnswer, AsyncClient, Completion, Options
from jitney.client.cache import AsyncCacheClient
from jitney.decision import PreemptionMode
from jitney.errors import JitneyError, Missing
from jitney.log_segments import LogReader
from jitney.scheduler_codec import decode_decision
from jitney.supervisor import Supervisor
from tests.support.tier_load import Sessions, Tokens, settled, tier
from tests.support.tiers import prompt, tiers

POOL = 24
DECODES = 6


async def all_at_once(target: str, first: int, salt: str = "") -> list[Completion]:
    """Long answers to short prompts: together they need more than twice the pool."""
    options = Options(max_tokens=120, ignore_eos=True, salt=salt)
    async with AsyncClient(target) as client:
        asked = [client.generate_once(prompt(first + i, 40), options) for i in range(DECODES)]
        return list(await asyncio.gather(*asked))


async def one_by_one(target: str, first: int) -> list[Completion]:
    """The same, alone, and with nothing to share."""
    options = Options(max_tokens=120, ignore_eos=True, salt="alone")
    async with AsyncClient(target) as client:
        return [await client.generate_once(prompt(first + i, 40), options) for i in range(DECODES)]


@pytest.mark.parametrize(
    ("mode", "cpu", "ssd"),
    [
        pytest.param(PreemptionMode.SWAP_CPU, 128, 0, id="cpu"),
        pytest.param(PreemptionMode.SWAP_SSD, 0, 2048, id="ssd"),
    ],
)
def test_swapped_answers_are_resumed_by_hits(tmp_path: Path, mode: PreemptionMode, cpu: int, ssd: int) -> None:
    """Nobody asks for the same twice: what is loaded was swapped, or preempted otherwise and stored meanwhile."""
    log = tmp_path / "log"
    flags = (f"--decision-log={log}",)

    async def run(house: Supervisor) -> None:
        async with AsyncClient(house.executor_target) as client:  # every rate is known then
            for seed in (*range(900, 906), *range(900, 906)):
                await client.generate_once(prompt(seed, 200), Options(max_tokens=40, ignore_eos=True))
        for first in (0, 100):
            together = await all_at_once(house.executor_target, first)
            assert sum(done.finished.usage.preemptions for done in together) > 0
        alone = await one_by_one(house.executor_target, 100)
        assert [done.token_ids for done in together] == [done.token_ids for done in alone]
        status = await settled(house.executor_target, house.cache_target)
        below = tier(status, "cpu" if cpu else "ssd")
        assert below.hit_tokens > 0, status
        assert below.bad_blocks == 0

    with tiers(tmp_path, pool=POOL, cpu=cpu, ssd=ssd, slow=True, executor_args=flags) as house:
        asyncio.run(run(house))
    with LogReader(log) as reader:
        modes = [mode for frame in reader for mode in decode_decision(frame.decision).preempt.mode.tolist()]
    assert mode in modes, modes


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sessions, list[list[Tokens]]]]:
    """50 sessions of 5 rounds, and what services with all the room in the world say to them."""
    sessions = Sessions(6, 50, 5, tokens=16, answer=6)
    with tiers(tmp_path_factory.mktemp("plain"), pool=1024, cpu=0, slow=True) as house:
        yield sessions, asyncio.run(sessions.run(house.executor_target))


@pytest.mark.parametrize(
    ("cpu", "ssd"),
    [
        pytest.param(96, 2048, id="all-tiers", marks=pytest.mark.slow),
        pytest.param(48, 0, id="evictions-while-loading"),
    ],
)
def test_22_23_slow_copies_of_a_crowd(
    tmp_path: Path, crowd: tuple[Sessions, list[list[Tokens]]], cpu: int, ssd: int
) -> None:
    """A pool for three of the longest; the CPU tier gives slots away while others are read."""
    sessions, alone = crowd

    async def run(house: Supervisor) -> None:
        for _ in range(2):
            assert await sessions.run(house.executor_target) == alone
        status = await settled(house.executor_target, house.cache_target)
        below = tier(status, "cpu")
        assert below.loaded_blocks > 0 and below.evictions > 0, status
        assert all(each.bad_blocks == 0 for each in status.tiers)

    with tiers(tmp_path, pool=32, cpu=cpu, ssd=ssd, slow=True, executor_args=("--copy-mib-per-s=8",)) as house:
        asyncio.run(run(house))


async def abort_after(limit_s: float, answer: AsyncAnswer) -> None:
    """It may have ended by then."""
    await asyncio.sleep(limit_s)
    with contextlib.suppress(Missing):
        await answer.abort()


class Cancelled:
    """Requests whose clients go away: after so many tokens, after a while, by an abort or a deadline."""

    def __init__(self, house: Supervisor, seed: int) -> None:
        self.house = house
        self.random = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.pinned = 0
        self.preemptions = 0

    async def rounds(self, count: int, at_once: int) -> None:
        """So many requests, so many at a time."""
        left = iter(range(count))
        async with AsyncClient(self.house.executor_target) as client:
            watching = asyncio.create_task(self._watch())
            await asyncio.gather(*(self._each(client, left) for _ in range(at_once)))
            watching.cancel()
            self.preemptions = (await client.status()).preemptions

    async def _watch(self) -> None:
        async with AsyncCacheClient(self.house.cache_target) as cache:
            while True:
                self.pinned = max(self.pinned, sum(each.pinned_slots for each in (await cache.status()).tiers))
                await asyncio.sleep(0.01)

    async def _each(self, client: AsyncClient, left: Iterator[int]) -> None:
        for _ in left:
            how = self.random.choice(("tokens", "time", "abort", "deadline", "whole"))
            ids = prompt(self.random.randrange(16), self.random.choice((40, 120, 200)))
            deadline_ms = self.random.randrange(1, 200) if how == "deadline" else None
            options = Options(max_tokens=self.random.choice((8, 100)), ignore_eos=True, deadline_ms=deadline_ms)
            answer = client.generate(ids, options)
            limit_s = self.random.random() * 0.3
            try:
                if how == "tokens":
                    async with answer:
                        most = self.random.randrange(6)
                        async for _ in answer:
                            if len(answer.token_ids) >= most:
                                break
                elif how == "time":
                    async with asyncio.timeout(limit_s):
                        await answer.result()
                elif how == "abort":
                    aborting = asyncio.create_task(abort_after(limit_s, answer))
                    await answer.result()
                    await aborting
                else:
                    await answer.result()
                self.ends[how if answer.finished is None else answer.finished.reason.name] += 1
            except TimeoutError:
                self.ends["time"] += 1
            except JitneyError as error:
                self.ends[type(error).__name__] += 1


def cancel_in_every_state(folder: Path, count: int) -> None:
    with tiers(folder, pool=32, cpu=48, ssd=1024, slow=True, executor_args=("--copy-mib-per-s=4",)) as house:
        cancelled = Cancelled(house, seed=1)

        async def run() -> None:
            async with AsyncClient(house.executor_target) as client:
                options = Options(max_tokens=40, ignore_eos=True)
                salted = Options(max_tokens=40, ignore_eos=True, salt="alone")
                alone = [(await client.generate_once(prompt(i, 200), salted)).token_ids for i in range(16)]
                await cancelled.rounds(count, 16)
                status = await settled(house.executor_target, house.cache_target)
                assert cancelled.pinned > 0 and cancelled.preemptions > 0 and len(cancelled.ends) >= 4, vars(cancelled)
                assert tier(status, "cpu").loaded_blocks > 0, status
                again = [(await client.generate_once(prompt(i, 200), options)).token_ids for i in range(16)]
                assert again == alone
            await settled(house.executor_target, house.cache_target)

        asyncio.run(run())


def test_34_clients_go_away_in_every_state(tmp_path: Path) -> None:
    """Waiting, loading, swapped out with pins, restoring, saving."""
    cancel_in_every_state(tmp_path, 300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_34_many_clients_go_away_in_every_state(tmp_path: Path) -> None:
    cancel_in_every_state(tmp_path, 3000)
