"""An audit that finds something turns readiness off, and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from cache_svc.epochs import DevicePool, Epochs
from cache_svc.server import CacheServicer
from cache_svc.tier_host import TierHost, TierSettings
from jitney.cache.v1 import cache_pb2 as pb
from tests.support.ledger_rig import BLOCK_TOKENS

IDLE_S = 0.01


def test_what_the_audit_finds_turns_readiness_off_until_it_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        said: asyncio.Queue[str] = asyncio.Queue()
        epochs = Epochs(bytes(16))
        host = TierHost(TierSettings(tmp_path, cpu_bytes=1 << 20), "a")
        servicer = CacheServicer(epochs, host)
        await host.prepare()
        tiers = await host.fit(4096, BLOCK_TOKENS)
        assert tiers is not None
        pool = DevicePool("executor", 1, b"f", 8, 4096, BLOCK_TOKENS)
        epochs.open(pool, redeclares=False, tiers=tiers)
        session = epochs.of("executor")
        auditing = asyncio.create_task(servicer.audit_when_idle(IDLE_S, said.put))
        try:
            device, below = session.ledger.blocks, tiers.lower.cpu
            faults: list[tuple[Callable[[], object], Callable[[], object]]] = [
                (lambda: device.free.remove(3), lambda: device.free.append(3)),
                (lambda: below.free.pop(3), lambda: below.free.update({3: None})),
            ]
            for spoil, mend in faults:
                spoil()
                host.touch()
                found = await asyncio.wait_for(said.get(), 30)
                assert "free list" in found
                status = await servicer.GetStatus(pb.GetStatusRequest(), None)
                assert status.not_ready == found
                assert not (await servicer.Audit(pb.AuditRequest(), None)).ok
                mend()
                host.touch()
                assert await asyncio.wait_for(said.get(), 30) == ""
            assert (await servicer.Audit(pb.AuditRequest(), None)).ok
        finally:
            auditing.cancel()
            await host.close(0.0)

    asyncio.run(main())


def test_nothing_is_said_to_be_forgotten_before_the_ssd_is_looked_at(tmp_path: Path) -> None:
    async def main() -> None:
        host = TierHost(TierSettings(tmp_path), "a")
        asked = pb.InvalidateRequest(tenant="t")
        answer = asyncio.ensure_future(CacheServicer(Epochs(bytes(16)), host).Invalidate(asked, None))
        await asyncio.sleep(IDLE_S)
        assert not answer.done()
        await host.prepare()
        assert await answer == pb.InvalidateResponse()
        await host.close(0.0)

    asyncio.run(main())
