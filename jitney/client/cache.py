"""The cache, for those who operate it: audit, invalidation, status. Users of a model talk to executors only."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache.v1 import cache_pb2_grpc
from jitney.client.cache_types import Audited, CacheStatus, Invalidated, audited, cache_status, invalidated
from jitney.client.retry import as_error
from jitney.keys import salt_digest
from jitney.serving import channels

TIMEOUT_S = 60.0


class AsyncCacheClient:
    """Calls a cache; for one event loop. Errors are classes of `jitney.errors`: Away if nobody answers."""

    def __init__(self, target: str, *, tls_ca: Path | None = None) -> None:
        self._target = target
        self._channel = channels.channel(target, tls_ca=tls_ca)
        self._stub: Any = cache_pb2_grpc.CacheStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def audit(self) -> Audited:
        """Has the cache check itself. Its answer may take a while: every block is looked at."""
        return audited(await self._call("Audit", pb.AuditRequest()))

    async def status(self) -> CacheStatus:
        """What is open, what the tiers hold, and what it came to."""
        return cache_status(await self._call("GetStatus", pb.GetStatusRequest()))

    async def invalidate_prefix(self, key: bytes) -> Invalidated:
        """Removes the block of this key and all behind it."""
        return await self._invalidate(pb.InvalidateRequest(prefix_key=key))

    async def invalidate_tenant(self, tenant: str) -> Invalidated:
        """Removes what this tenant computed first."""
        return await self._invalidate(pb.InvalidateRequest(tenant=tenant))

    async def invalidate_salt(self, salt: str) -> Invalidated:
        """Removes what was computed under this salt."""
        return await self._invalidate(pb.InvalidateRequest(salt_digest=salt_digest(salt)))

    async def invalidate_model_version(self, version: str) -> Invalidated:
        """Removes what this version of a model computed."""
        return await self._invalidate(pb.InvalidateRequest(model_version=version))

    async def _invalidate(self, request: pb.InvalidateRequest) -> Invalidated:
        return invalidated(await self._call("Invalidate", request))

    async def _call(self, method: str, request: object) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise as_error(error, self._target, "cache") from error
