"""A TCP proxy that cuts its connections when asked to, and may hold back what the server sends."""

from __future__ import annotations

import asyncio
import contextlib


class BreakingProxy:
    """Forwards to `port` on the loopback interface."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._pairs: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers = asyncio.Event()
        self._answers.set()
        self.connections = 0
        self.port = 0

    async def start(self) -> None:
        """Listens on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def hold_answers(self, hold: bool) -> None:
        """Whether bytes of the server are kept from the client."""
        (self._answers.clear if hold else self._answers.set)()

    def cut(self) -> None:
        """Ends all connections now; what was held back is lost."""
        for writer in self._pairs:
            writer.transport.abort()
        self._answers.set()

    async def stop(self) -> None:
        """Ends everything."""
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        self.connections += 1
        self._pairs |= {writer, back}
        for source, sink, held in ((reader, back, False), (there, writer, True)):
            task = asyncio.create_task(self._pump(source, sink, held))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, held: bool) -> None:
        with contextlib.suppress(OSError, ConnectionError):
            while data := await source.read(1 << 16):
                if held:
                    await self._answers.wait()
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
        self._pairs.discard(sink)
