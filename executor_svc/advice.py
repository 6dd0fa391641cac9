"""What the executor asks of a scheduler outside of its steps: an explanation, and whether it can decide by a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

from executor_svc.situation import Reads
from jitney.errors import Away, JitneyError
from jitney.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from jitney.scheduler_codec import encode_snapshot
from jitney.serving.channels import channel
from jitney.serving.status import from_rpc_error
from jitney.snapshot import PolicyChoice, Snapshot

TIMEOUT_S = 5.0

T = TypeVar("T")
Preview = Callable[[PolicyChoice, Reads], Snapshot]


class SchedulerAdvice:
    """Asks one replica after another until one answers. Belongs to one event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        preview: Preview,
        tls_ca: Path | None = None,
    ) -> None:
        """`preview` gives the situation as a policy that reads so much is shown it; may block."""
        self._channels = [channel(address, tls_ca=tls_ca) for address in addresses]
        self._stubs: list[Any] = [scheduler_pb2_grpc.SchedulerStub(c) for c in self._channels]
        self._preview = preview

    async def close(self) -> None:
        """Ends the connections."""
        for link in self._channels:
            await link.close()

    async def explain(self, snapshot: Snapshot, request_id: int) -> scheduler_pb2.Explanation:
        """Why the request is where it is. Missing if the snapshot does not name it, Away if nobody answers."""
        message = scheduler_pb2.Snapshot.FromString(encode_snapshot(snapshot))
        request = scheduler_pb2.ExplainRequest(snapshot=message, id=request_id)
        return await self._first(lambda stub: stub.Explain(request, timeout=TIMEOUT_S))

    async def reads(self, policy: str) -> Reads | None:
        """What the policy reads of a snapshot; None if the schedulers do not know it. Away if none answers."""
        request = scheduler_pb2.ListPoliciesRequest()
        answer = await self._first(lambda stub: stub.ListPolicies(request, timeout=TIMEOUT_S))
        for info in answer.policies:
            if info.name == policy:
                return Reads(frozenset(info.waiting_columns) | {"id"}, frozenset(info.tables))
        return None

    async def try_policy(self, choice: PolicyChoice) -> Reads | None:
        """Tries the policy on the situation of now; raises what a scheduler has against it.

        Returns what it reads, for the executor to send from now on.
        """
        reads = await self.reads(choice.name)
        trial = await asyncio.to_thread(self._preview, choice, reads or Reads(frozenset({"id"}), frozenset()))
        message = scheduler_pb2.Snapshot.FromString(encode_snapshot(trial))
        await self._first(lambda stub: stub.DecideOnce(message, timeout=TIMEOUT_S))
        return reads

    async def _first(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        """The first answer; an error other than Away is an answer, too."""
        last: JitneyError = Away("no scheduler is configured")
        for stub in self._stubs:
            try:
                return await ask(stub)
            except grpc.aio.AioRpcError as error:
                last = from_rpc_error(error)
                if not isinstance(last, Away):
                    raise last from None
        raise last
