"""Load for the tiers as a process: sessions whose prompts grow by what was answered, and what has to be left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from jitney.client import AsyncClient, Completion, Options
from jitney.client.cache import AsyncCacheClient
from jitney.client.cache_types import CacheStatus, TierStatus
from jitney.client.retry import RetryPolicy
from tests.support.tiers import BLOCK_TOKENS, prompt

Tokens = tuple[int, ...]
SETTLES_S = 60.0
PATIENT = RetryPolicy(connect_s=120.0)
"""An executor that was killed is away for a while on a busy machine."""


class Sessions:
    """`count` conversations of `rounds` rounds. Each round asks with all that was said so far and something new.

    `first` tells this set of conversations from others; with another `salt` the same ones share nothing. `answers` has
    what was answered, by session, round by round.
    """

    def __init__(
        self, first: int, count: int, rounds: int, *, tokens: int = 40, answer: int = 12, salt: str = ""
    ) -> None:
        self.first, self.count, self.rounds = first, count, rounds
        self.tokens, self.answer, self.salt = tokens, answer, salt
        self.answers: list[list[Completion]] = []
        self.whole: list[list[int]] = [[] for _ in range(count)]  # prompts and answers, as far as they go
        self.said = 0

    async def run(self, target: str) -> list[list[Tokens]]:
        """All sessions at once; the tokens of every answer."""
        self.answers = [[] for _ in range(self.count)]
        self.said = 0
        async with AsyncClient(target, retry=PATIENT) as client:
            await asyncio.gather(*(self._talk(client, number) for number in range(self.count)))
        return [[done.token_ids for done in session] for session in self.answers]

    async def _talk(self, client: AsyncClient, number: int) -> None:
        ids: list[int] = []
        for each in range(self.rounds):
            ids += prompt(1000 * self.first + 10 * number + each, self.tokens + number % BLOCK_TOKENS)
            options = Options(max_tokens=self.answer, ignore_eos=True, tenant=f"tenant-{number % 3}", salt=self.salt)
            answer = client.generate(ids, options)
            async for _ in answer:
                self.said += 1
            done = await answer.result()
            self.answers[number].append(done)
            ids += done.token_ids
            self.whole[number] = ids

    def cached(self) -> tuple[int, int, int]:
        """Cached prompt tokens of all answers: device, CPU tier, SSD."""
        usages = [done.finished.usage for session in self.answers for done in session]
        return (
            sum(usage.cached_device_tokens for usage in usages),
            sum(usage.cached_cpu_tokens for usage in usages),
            sum(usage.cached_ssd_tokens for usage in usages),
        )

    async def after(self, events: int) -> None:
        """Returns once so many events have come."""
        while self.said < events:
            await asyncio.sleep(0.005)


async def disturbed(
    sessions: Sessions, target: str, disturb: Callable[[], Coroutine[Any, Any, None]]
) -> list[list[Tokens]]:
    """The tokens of all sessions while that is done to the services."""
    disturbing = asyncio.create_task(disturb())
    try:
        return await sessions.run(target)
    finally:
        await disturbing


def tier(status: CacheStatus, name: str) -> TierStatus:
    """One of the lower tiers."""
    return next(each for each in status.tiers if each.name == name)


async def leftovers(executor: str, cache: str) -> list[str]:
    """What services that are idle should not have any more."""
    left: list[str] = []
    async with AsyncClient(executor) as client, AsyncCacheClient(cache) as operator:
        status, below = await client.status(), await operator.status()
        audited = await operator.audit()
    left += audited.findings
    if status.num_running or status.num_waiting:
        left.append(f"{status.num_running} running, {status.num_waiting} waiting")
    for pool in below.executors:
        blocks = pool.blocks
        if blocks.free + blocks.evictable != blocks.total or pool.requests:
            left.append(f"{pool.executor}: {blocks}, {pool.requests} requests")
    for each in below.tiers:
        if each.pinned_slots or each.retired_slots:
            left.append(f"{each.name}: {each.pinned_slots} slots pinned, {each.retired_slots} retired")
    if below.scanning:
        left.append("the SSD is still being read")
    if below.not_ready:
        left.append(below.not_ready)
    return left


async def settled(executor: str, cache: str) -> CacheStatus:
    """The cache's status once nothing is left behind; fails after a while."""
    end = time.monotonic() + SETTLES_S
    while left := await leftovers(executor, cache):
        assert time.monotonic() < end, left
        await asyncio.sleep(0.1)
    async with AsyncCacheClient(cache) as operator:
        return await operator.status()


def segments_mapped(pid: int) -> list[str]:
    """Segments of CPU tiers that a process has mapped though their files are gone."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if "segment-" in line and line.endswith("(deleted)")]


def left_in(shared: Path) -> list[str]:
    """What is in a shared folder: directories of caches, and locks of executors."""
    return sorted(path.name for path in shared.iterdir() if path.name != "sweep.lock")
