"""A service that answers at once: what gRPC in Python alone costs, for the same bytes in the same run.

`python -m bench.echo` serves one stream method that answers each message with so many of its bytes as the call's
metadata says, behind the same server plumbing as the real services.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from jitney.serving.channels import channel
from jitney.serving.config import ServingConfig, load_or_exit
from jitney.serving.server import build_server, run, serve_until_signal

NAME = "jitney.bench.Echo"
METHOD = f"/{NAME}/Echo"
ANSWER_BYTES = "answer-bytes"


async def echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    """The beginning of each message."""
    metadata = dict(context.invocation_metadata() or ())
    count = int(metadata[ANSWER_BYTES])
    async for data in requests:
        await context.write(data[:count])


async def echo_us(target: str, message: bytes, answer_bytes: int, count: int) -> list[float]:
    """Round trips of so many messages, one after another, and before them some that do not count."""
    link = channel(target)
    call: Any = link.stream_stream(METHOD)(metadata=((ANSWER_BYTES, str(answer_bytes)),))
    times = []
    for _ in range(count + count // 4):
        started = time.perf_counter_ns()
        await call.write(message)
        await call.read()
        times.append((time.perf_counter_ns() - started) / 1e3)
    await call.done_writing()
    await link.close()
    return times[count // 4 :]


async def main(config: ServingConfig) -> int:
    """Serves until a signal."""
    server = build_server(config, "echo")
    handler: Any = grpc.stream_stream_rpc_method_handler(echo)
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, {"Echo": handler}),))
    server.offer(NAME)
    return await serve_until_signal(server)


if __name__ == "__main__":
    sys.exit(run(main(load_or_exit(ServingConfig, "echo"))))
