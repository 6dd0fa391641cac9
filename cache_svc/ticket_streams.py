"""The streams on which executors are told of their tickets: one an epoch, the newest wins.

A stream that is opened gets all that is open; from then on what is new. What an executor without a stream should know
waits in its tickets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cache_svc.pins import Owner
from jitney.errors import Aborted, JitneyError
from jitney.ticket_ops import TicketEvent

Queue = asyncio.Queue[TicketEvent | Exception | None]
"""What a stream is to say; an error ends it, None too."""


class TicketStreams:
    """The open ones. Lives on the event loop."""

    def __init__(self) -> None:
        self._queues: dict[Owner, Queue] = {}

    @property
    def owners(self) -> list[Owner]:
        """Who has one."""
        return list(self._queues)

    def open(self, owner: Owner, queue: Queue) -> None:
        """Events for that executor go there from now on; a stream that it had before ends."""
        if self._queues.get(owner) is not queue:
            self.end(
                owner, Aborted("a newer stream of this epoch tells of its tickets", field="executor", value=owner[0])
            )
        self._queues[owner] = queue

    def tell(self, owner: Owner, events: Sequence[TicketEvent]) -> None:
        """Sends them."""
        queue = self._queues[owner]
        for event in events:
            queue.put_nowait(event)

    def end(self, owner: Owner, why: JitneyError) -> None:
        """Ends the stream of that executor, if there is one, with an error."""
        queue = self._queues.pop(owner, None)
        if queue is not None:
            queue.put_nowait(why)

    def closed(self, owner: Owner, queue: Queue) -> None:
        """That stream is no more."""
        if self._queues.get(owner) is queue:
            del self._queues[owner]
