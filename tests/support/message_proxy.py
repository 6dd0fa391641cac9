"""A gRPC proxy that passes every call on, message by message, and may do to the messages of some what a network does:
say them twice, late, in another order, or not at all. What was lost is lost with its stream, which is cut soon."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc
import grpc.aio

LATE_S = 0.03
CUT_AFTER_S = 0.1
KINDS = ("twice", "late", "swapped", "lost")


class MessageProxy:
    """Listens on a free port. Streams whose method's name is in `disturbed` suffer, one message in `every`."""

    def __init__(self, target: str, seed: int, every: int) -> None:
        self.disturbed: Collection[str] = ()
        self.done: Counter[tuple[str, str, str]] = Counter()  # what was done, to which stream, in which direction
        self._target = target
        self._every = every
        self._random = random.Random(seed)
        self._cuts: set[asyncio.Event] = set()

    async def start(self) -> str:
        """Returns its address."""
        self._channel = grpc.aio.insecure_channel(self._target)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers([_Everything(self._pass_on)])
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Ends everything."""
        await self._server.stop(0.1)
        await self._channel.close()

    def cut(self) -> None:
        """Ends all streams that suffer."""
        for cut in self._cuts:
            cut.set()

    async def _pass_on(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        name, left_s, cut = method.rpartition("/")[2], context.time_remaining(), asyncio.Event()
        suffers = name in ("Apply", "Tickets")
        stream: Any = self._channel.stream_stream(method)
        call = stream(self._messages(name, "up", requests, cut) if suffers else requests, timeout=left_s)
        answers = aiter(self._messages(name, "down", call, cut) if suffers else call)
        ended = asyncio.create_task(cut.wait())
        self._cuts.add(cut)
        try:
            while True:
                coming = asyncio.ensure_future(anext(answers))
                await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait((coming,))
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
                try:
                    message = coming.result()
                except StopAsyncIteration:
                    return
                yield message
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
        finally:
            self._cuts.discard(cut)
            ended.cancel()
            call.cancel()

    async def _messages(
        self, name: str, direction: str, source: AsyncIterator[bytes], cut: asyncio.Event
    ) -> AsyncIterator[bytes]:
        """The messages of one direction of a stream; its first one, which says hello, stays as it is."""
        kept: bytes | None = None
        first = True
        async for message in source:
            kind = ""
            if name in self.disturbed and not first and not self._random.randrange(self._every):
                kind = self._random.choice(KINDS)
                self.done[kind, name, direction] += 1
            first = False
            if kind in ("swapped", "lost"):
                asyncio.get_running_loop().call_later(CUT_AFTER_S, cut.set)
            if kind == "late":
                await asyncio.sleep(LATE_S)
            if kind == "swapped" and kept is None:
                kept = message
                continue
            if kind != "lost":
                yield message
            if kind == "twice":
                yield message
            if kept is not None:
                yield kept
                kept = None


class _Everything(grpc.GenericRpcHandler):
    """Every method there is: single messages are streams of one."""

    def __init__(self, pass_on: Any) -> None:
        self._pass_on = pass_on

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method

        async def behaviour(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for message in self._pass_on(method, requests, context):
                yield message

        return grpc.stream_stream_rpc_method_handler(behaviour)
