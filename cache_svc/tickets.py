"""Open tickets of one executor: what it was asked to copy and has not answered, and what it was not told yet.

Tickets are numbered from 1 on in each epoch. One is open until the executor answers it, or it ends with the epoch; an
answer to one that has ended changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jitney.block_ops import Block, RequestId
from jitney.errors import Missing
from jitney.keys import Key
from jitney.ticket_ops import Slot, Ticket, TicketEvent


@dataclass(slots=True)
class Store:
    """Device blocks to be copied into slots. `pinned[i]`: block i is pinned on the device until the ticket ends.

    A block that is not pinned may be evicted and filled anew while it is copied. Its handle tells it: the copy is void.
    """

    ticket: Ticket
    blocks: list[Block]
    slots: list[int]
    pinned: list[bool]
    urgent: bool


@dataclass(slots=True)
class Load:
    """Blocks on their way to the device. Lists are indexed by the block's place in the ticket.

    The first `offered` were told to the executor; `ready[i]`: slot i can be read. Only the first `end` will ever come.
    `from_ssd[i]`: block i was on the SSD only.
    """

    ticket: Ticket
    request: RequestId
    keys: list[Key]
    targets: list[int]
    slots: list[int]
    ready: list[bool]
    from_ssd: list[bool]
    end: int
    offered: int = 0


@dataclass(slots=True)
class Tickets:
    """Of one epoch of an executor. `open` is in the order of their numbers."""

    last: int = 0
    open: dict[Ticket, Store | Load] = field(default_factory=dict)
    events: list[TicketEvent] = field(default_factory=list)

    def number(self) -> Ticket:
        """The next one."""
        self.last += 1
        return Ticket(self.last)

    def answered(self, ticket: Ticket) -> Store | Load | None:
        """The ticket that is answered, None if it has ended before. Missing if it was never given."""
        if not 1 <= ticket <= self.last:
            raise Missing(f"ticket {ticket} was never given", field="ticket", limit=self.last, value=ticket)
        return self.open.get(ticket)

    def take_events(self) -> list[TicketEvent]:
        """What the executor was not told yet."""
        events, self.events = self.events, []
        return events


def handles(slots: Sequence[int], generations: Sequence[int]) -> list[Slot]:
    """The slots as tickets name them."""
    return [Slot(generations[slot] << 32 | slot) for slot in slots]
