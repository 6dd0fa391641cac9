"""The smallest real service on the server plumbing: `Generate` counts to max_tokens, `Abort` fails in every way."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from jitney.errors import Conflict, InvalidRequest, JitneyError, TooLarge
from jitney.executor.v1 import executor_pb2 as pb
from jitney.executor.v1 import executor_pb2_grpc
from jitney.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from jitney.serving import logs, tracing
from jitney.serving.config import ServingConfig, load_or_exit, option
from jitney.serving.server import ServiceServer, build_server, run, serve_until_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig(ServingConfig):
    """Settings of the tiny service."""

    load_s: float = option(0.0, "Seconds until it is ready")
    cannot_load: bool = option(False, "Whether loading fails")


class Executor(executor_pb2_grpc.ExecutorServicer):
    """Counts, and fails as it is told."""

    def __init__(self, server: ServiceServer) -> None:
        self._server = server

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        """max_tokens deltas, one every 20 ms."""
        for number in range(request.max_tokens):
            with tracing.span("delta", number=number):
                yield pb.GenerateEvent(delta=pb.Delta(token_ids=[number]))
                await asyncio.sleep(0.02)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Raises what the request id names."""
        errors: dict[str, Exception] = {
            "invalid": InvalidRequest("n is 3, at most 2", field="n", limit=2, value=3),
            "full": TooLarge("the queue is full", field="queue", limit=9, value=10, retry_after_us=1_500_000),
            "bug": ValueError("the secret prompt"),
            "plain": JitneyError("a step failed"),
        }
        if request.request_id == "stop":
            self._server.request_stop("fenced", exit_code=3)
        if request.request_id in errors:
            raise errors[request.request_id]
        return pb.AbortResponse()


class Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Echoes the step."""

    async def Decide(self, snapshots: AsyncIterator[scheduler_pb2.Snapshot], context: Any) -> AsyncIterator[Any]:
        """A session that never ends by itself."""
        async for snapshot in snapshots:
            with tracing.step("decide", snapshot.executor, snapshot.incarnation, snapshot.step):
                yield scheduler_pb2.Decision(step=snapshot.step)


async def main(config: TinyConfig) -> int:
    """Serves both."""
    server = build_server(config, "tiny")
    executor_pb2_grpc.add_ExecutorServicer_to_server(Executor(server), server.grpc)
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(Scheduler(), server.grpc)
    server.offer("jitney.executor.v1.Executor", "jitney.scheduler.v1.Scheduler")

    async def load() -> None:
        if config.cannot_load:
            raise Conflict("the model file is truncated")
        for tenth in range(10):
            logs.get().info("loading", stage="weights", fraction=tenth / 10)
            await asyncio.sleep(config.load_s / 10)

    return await serve_until_signal(server, prepare=load)


if __name__ == "__main__":
    sys.exit(run(main(load_or_exit(TinyConfig, "tiny"))))
