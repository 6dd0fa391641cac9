"""Events over ZeroMQ, as vLLM publishes its own: a PUB socket for what happens, a ROUTER socket for what was missed.

PUB sends [topic, number, batch]; the number is 8 bytes big-endian, from 0 on, without gaps. A ROUTER client asks with
[empty, first number] and gets [empty, topic, number, batch] for each batch from there on, then [empty, empty, -1,
empty]. If batches from that number on are kept no more, or it lies ahead (the cache was restarted), it gets all that
there is instead: parts that begin with AllBlocksCleared, all under the number of the last batch. So a subscriber that
comes late connects its SUB socket, asks from 0 on, and then takes from SUB what has higher numbers.

The first batch of a cache is AllBlocksCleared: whoever knew an earlier one forgets it.

Belongs to the event loop on which the ledgers run, so that a snapshot is of one moment. Needs the extra `events`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import zmq
import zmq.asyncio

from cache_svc.kv_events import Cleared, Event, Feed
from cache_svc.kv_events_wire import encode
from jitney.errors import Away
from jitney.serving import logs

END: Final = (-1).to_bytes(8, "big", signed=True)
SNAPSHOT_BLOCKS: Final = 4096
"""Blocks in one message of a snapshot."""
SEND_QUEUE: Final = 100_000
Part = tuple[int | None, list[Event]]


class EventPublisher:
    """Publishes what the feed has whenever `flush` is called. `kept`: so many of the last batches can be asked for."""

    def __init__(self, feed: Feed, topic: str, kept: int, now_s: Callable[[], float]) -> None:
        self._feed = feed
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._now_s = now_s
        self._next = 0
        self._log = logs.get("kv_events")
        self._context = zmq.asyncio.Context()
        self._pub: Any = zmq.Context(self._context).socket(zmq.PUB)
        self._pub.set_hwm(SEND_QUEUE)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self._task: asyncio.Task[None] | None = None

    def open(self, endpoint: str, replay_endpoint: str) -> tuple[str, str]:
        """Binds, e.g. to "tcp://127.0.0.1:5557" (port 0 or `*`: a free one), and publishes that nothing is there.

        Returns where it listens. Away if an endpoint is taken or none.
        """
        bound = []
        for socket, address in ((self._pub, endpoint), (self._router, replay_endpoint)):
            try:
                socket.bind(address.removesuffix(":0") + ":*" if address.endswith(":0") else address)
            except zmq.ZMQError as error:
                self.close()
                raise Away(f"KV events cannot be published at {address}: {error}", field="kv_events") from error
            bound.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._task = asyncio.create_task(self._serve())
        self._publish(None, [Cleared()])
        return bound[0], bound[1]

    def close(self) -> None:
        """Ends it."""
        if self._task is not None:
            self._task.cancel()
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.term()

    def flush(self) -> None:
        """Publishes what happened since the last time."""
        for rank, events in self._feed.take():
            self._publish(rank, events)

    def _publish(self, rank: int | None, events: list[Event]) -> None:
        payload = encode(self._now_s(), events, rank)
        self._pub.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._kept.append((self._next, payload))
        self._next += 1

    async def _serve(self) -> None:
        """Answers one question after the other."""
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                self._log.warning("a question for KV events is malformed", frames=len(frames))
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in self._answer(first):
                await self._router.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
                await asyncio.sleep(0)  # batches go on meanwhile
            await self._router.send_multipart((client, b"", b"", END, b""))

    def _answer(self, first: int) -> Iterator[tuple[int, bytes]]:
        oldest = self._kept[0][0] if self._kept else self._next
        if oldest <= first <= self._next:
            return iter([kept for kept in self._kept if kept[0] >= first])
        self.flush()
        return self._snapshot(self._next - 1, self._feed.snapshot(SNAPSHOT_BLOCKS))

    def _snapshot(self, number: int, parts: Iterator[Part]) -> Iterator[tuple[int, bytes]]:
        yield number, encode(self._now_s(), [Cleared()], None)
        for rank, events in parts:
            yield number, encode(self._now_s(), events, rank)
