"""An executor is stopped in the middle of a store, another one takes its name and its slots' neighbours, and the first
one goes on: what it writes late is read by nobody, it ends by itself, and its slots come back with its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from jitney.client import AsyncClient, Options
from jitney.client.cache import AsyncCacheClient
from jitney.service_process import ServiceProcess
from tests.support.processes import service, wait_until
from tests.support.tier_load import Sessions, disturbed, settled, tier
from tests.support.tiers import cache_flags, executor_flags, prompt

CPU = 16


async def stopped_in_a_store(executor: ServiceProcess, cache: AsyncCacheClient) -> int:
    """Stops the executor; how many slots it was filling."""
    async with AsyncClient(executor.target) as client:

        async def ask(seed: int) -> None:
            while True:
                await client.generate_once(prompt(seed, 200), Options(max_tokens=4, ignore_eos=True))
                seed += 4

        asking = [asyncio.create_task(ask(seed)) for seed in range(4)]
        try:
            while True:
                await asyncio.sleep(0.05)
                executor.signal(signal.SIGSTOP)
                await asyncio.sleep(0.1)  # what it had sent has arrived
                status = tier(await cache.status(), "cpu")
                filling = status.used_slots - (status.stored_blocks - status.evictions)
                if filling > 0:
                    return filling
                executor.signal(signal.SIGCONT)
        finally:
            for task in asking:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


def test_slots_of_a_stopped_executor_are_nobodys_until_it_is_gone(tmp_path: Path) -> None:
    flags = (*executor_flags(tmp_path, 32, slow=True), "--name=twin", f"--shared-dir={tmp_path / 'shared'}")
    below = (*cache_flags(tmp_path, CPU, 0), f"--shared-dir={tmp_path / 'shared'}")
    sessions = Sessions(2, 6, 3)

    async def run(first: ServiceProcess, second: ServiceProcess, target: str) -> None:
        async with AsyncCacheClient(target) as cache:
            expected = await sessions.run(first.target)
            filling = await stopped_in_a_store(first, cache)
            await asyncio.to_thread(second.start)
            await asyncio.to_thread(wait_until, lambda: second.listens() and second.serves(), 120.0)
            assert await sessions.run(second.target) == expected
            status = tier(await cache.status(), "cpu")
            assert status.retired_slots == filling
            assert status.evictions > 0, "other slots were given away anew"
            first.signal(signal.SIGCONT)
            assert await sessions.run(second.target) == expected
            await asyncio.to_thread(wait_until, lambda: first.exit_status() is not None, 60.0)
            assert first.exit_status() == 1, first.last_words()
            assert await sessions.run(second.target) == expected
            assert sessions.cached()[1] > 0
            after = await settled(second.target, target)
            assert tier(after, "cpu").bad_blocks == 0

    with (
        service("scheduler_svc", folder=tmp_path) as scheduler,
        service("cache_svc", *below, folder=tmp_path) as cache,
    ):
        flags = (*flags, f"--cache={cache.target}", f"--schedulers={scheduler.target}")
        second = ServiceProcess("second", "executor_svc", flags, tmp_path)
        try:
            with service("executor_svc", *flags, "--copy-mib-per-s=1", folder=tmp_path) as first:
                asyncio.run(run(first, second, cache.target))
        finally:
            second.end(0.0)


@pytest.mark.slow
def test_an_executor_is_killed_beside_another_one(tmp_path: Path) -> None:
    """Two share the tiers below; what one was copying when it was killed is let go, and the other one has its hits."""
    flags = (*executor_flags(tmp_path, 32, slow=True), f"--shared-dir={tmp_path / 'shared'}", "--copy-mib-per-s=8")
    below = (*cache_flags(tmp_path, 64, 1024), f"--shared-dir={tmp_path / 'shared'}")
    mine, theirs = Sessions(7, 10, 4), Sessions(8, 10, 4)

    async def run(first: ServiceProcess, second: ServiceProcess, target: str) -> None:
        expected = await mine.run(second.target)
        working = asyncio.create_task(theirs.run(first.target))
        await theirs.after(150)

        async def kill() -> None:
            await mine.after(50)
            first.signal(signal.SIGKILL)

        assert await disturbed(mine, second.target, kill) == expected
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert await mine.run(second.target) == expected
        common = Sessions(8, 10, 1)  # which the killed one was asked first
        await common.run(second.target)
        assert sum(common.cached()[1:]) > 0
        async with AsyncCacheClient(target) as cache:
            status = await cache.status()
            assert not (await cache.audit()).findings and not status.not_ready
        assert [(each.pinned_slots, each.retired_slots, each.bad_blocks) for each in status.tiers] == [(0, 0, 0)] * 2

    with (
        service("scheduler_svc", folder=tmp_path) as scheduler,
        service("cache_svc", *below, folder=tmp_path) as cache,
    ):
        flags = (*flags, f"--cache={cache.target}", f"--schedulers={scheduler.target}")
        second = ServiceProcess("second", "executor_svc", (*flags, "--name=second"), tmp_path)
        second.start()
        try:
            with service("executor_svc", *flags, "--name=first", folder=tmp_path) as first:
                wait_until(lambda: second.listens() and second.serves(), 120.0)
                asyncio.run(run(first, second, cache.target))
        finally:
            second.end(0.0)
