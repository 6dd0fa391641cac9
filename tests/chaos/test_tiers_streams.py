"""What executor and cache tell each other comes twice, late, in another order or not at all: every answer is right, and
nothing is left behind once they hear each other again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from jitney.service_process import ServiceProcess
from tests.support.message_proxy import KINDS, MessageProxy
from tests.support.processes import service, wait_until
from tests.support.tier_load import Sessions, settled, tier
from tests.support.tiers import cache_flags, executor_flags


def test_messages_come_twice_late_swapped_or_not_at_all(tmp_path: Path) -> None:
    flags = (*executor_flags(tmp_path, 40), "--name=streams", "--copy-mib-per-s=16")

    async def run(cache: str, scheduler: str) -> None:
        proxy = MessageProxy(cache, seed=1, every=4)
        between = await proxy.start()
        executor = ServiceProcess(
            "executor", "executor_svc", (*flags, f"--cache={between}", f"--schedulers={scheduler}"), tmp_path
        )
        try:
            await asyncio.to_thread(executor.start)
            await asyncio.to_thread(wait_until, lambda: executor.listens() and executor.serves(), 120.0)
            expected = await Sessions(4, 12, 4, salt="undisturbed").run(executor.target)
            for method in ("Tickets", "Apply"):
                proxy.disturbed = (method,)
                sessions = Sessions(4, 12, 4, salt=method)
                assert await sessions.run(executor.target) == expected, method
                proxy.disturbed = ()
                proxy.cut()
                status = await settled(executor.target, cache)
                assert tier(status, "cpu").bad_blocks == 0
                for kind in KINDS:
                    assert any(proxy.done[kind, method, direction] for direction in ("up", "down")), proxy.done
                assert await sessions.run(executor.target) == expected
            await settled(executor.target, cache)
        finally:
            await asyncio.to_thread(executor.end, 0.0)
            await proxy.stop()

    with (
        service("scheduler_svc", folder=tmp_path) as scheduler,
        service("cache_svc", *cache_flags(tmp_path, 64, 1024), folder=tmp_path) as cache,
    ):
        asyncio.run(run(cache.target, scheduler.target))
