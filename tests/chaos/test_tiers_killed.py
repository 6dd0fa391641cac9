"""Kill -9 of the cache and of the executor while copies between the tiers are under way: every answer is that of an
undisturbed run, nothing stays behind, and what was stored is found again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitney.client import AsyncClient
from jitney.supervisor import Supervisor
from tests.support.processes import wait_until
from tests.support.tier_load import Sessions, Tokens, disturbed, left_in, segments_mapped, settled, tier
from tests.support.tiers import tiers

SLOW = ("--copy-mib-per-s=8", "--name=killed")
"""A block takes half a millisecond each way, which is less than to compute it: some are always under way."""
KILLS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def sessions(folder: Path) -> Sessions:
    return Sessions(1, 12, 4)


@pytest.fixture(scope="module")
def alone(folder: Path, sessions: Sessions) -> list[list[Tokens]]:
    """What services that nobody hurts and that have no lower tiers answer."""
    with tiers(folder / "plain", pool=512, cpu=0, slow=True) as house:
        return asyncio.run(sessions.run(house.executor_target))


@pytest.fixture(scope="module")
def house(folder: Path, alone: list[list[Tokens]]) -> Iterator[Supervisor]:
    """Services that the tests may hurt."""
    shared = folder / "shared"
    with tiers(folder, pool=40, cpu=96, ssd=2048, slow=True, shared=shared, executor_args=SLOW) as supervisor:
        yield supervisor
        supervisor.stop()
    assert left_in(shared) == []


def test_the_cache_is_killed_while_blocks_are_copied(
    folder: Path, house: Supervisor, sessions: Sessions, alone: list[list[Tokens]]
) -> None:
    async def kill() -> None:
        for at in range(1, KILLS + 1):
            await sessions.after(at * 100)
            pid = house.kill("cache")
            await asyncio.to_thread(house.wait_serving, "cache", not_pid=pid)

    async def run() -> None:
        restarts = house.restarts["cache"]
        assert await disturbed(sessions, house.executor_target, kill) == alone
        assert house.restarts["cache"] == restarts + KILLS
        await settled(house.executor_target, house.cache_target)
        assert len([name for name in left_in(folder / "shared") if name.startswith("cache-")]) == 1
        assert segments_mapped(house.pids["executor"]) == []
        pid = house.kill("cache")
        await asyncio.to_thread(house.wait_serving, "cache", not_pid=pid)
        wait_until(lambda: not segments_mapped(house.pids["executor"]))
        await settled(house.executor_target, house.cache_target)
        async with AsyncClient(house.executor_target) as client:
            found = [await client.explain_cache(ids) for ids in sessions.whole]
        assert sum(each.ssd_tokens for each in found) >= sum(each.prompt_tokens for each in found) // 2, found
        assert await sessions.run(house.executor_target) == alone
        below = await settled(house.executor_target, house.cache_target)
        assert tier(below, "ssd").bad_blocks == tier(below, "cpu").bad_blocks == 0

    asyncio.run(run())


def test_the_executor_is_killed_while_blocks_are_copied(
    folder: Path, house: Supervisor, sessions: Sessions, alone: list[list[Tokens]]
) -> None:
    async def kill() -> None:
        for at in range(1, KILLS + 1):
            await sessions.after(at * 100)
            pid = house.kill("executor")
            await asyncio.to_thread(house.wait_serving, "executor", not_pid=pid)

    async def run() -> None:
        assert await disturbed(sessions, house.executor_target, kill) == alone
        before = await settled(house.executor_target, house.cache_target)
        assert len(left_in(folder / "shared")) == 2, "one lock, one directory"
        await again("executor")
        assert sessions.cached()[1] > 0
        after = await settled(house.executor_target, house.cache_target)
        assert tier(after, "cpu").hit_tokens > tier(before, "cpu").hit_tokens
        await again("executor", "cache")
        assert sessions.cached()[2] > 0
        await settled(house.executor_target, house.cache_target)

    async def again(*names: str) -> None:
        for name in names:
            pid = house.kill(name)
            await asyncio.to_thread(house.wait_serving, name, not_pid=pid)
        assert await sessions.run(house.executor_target) == alone

    asyncio.run(run())
