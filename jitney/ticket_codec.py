"""Tickets between plain values (`jitney.ticket_ops`) and the messages of `jitney.cache.v1`.

Bytes that cannot be what they stand for raise InvalidRequest with the field, the limit and the value.
"""

from __future__ import annotations

from jitney.block_ops import RequestId
from jitney.cache.v1 import cache_pb2 as pb
from jitney.errors import InvalidRequest
from jitney.packed import handles, pack, split_keys, unpack
from jitney.ticket_ops import (
    AbortTicket,
    LoadDone,
    LoadReady,
    Prefetch,
    Slot,
    StoreDone,
    StoreOrder,
    Ticket,
    TicketCall,
    TicketEvent,
    TicketLost,
)


def encode_call(call: TicketCall | None) -> pb.TicketCall:
    """The call as a message, None as the hello. Executor, epoch and boot id are set by who sends it."""
    match call:
        case None:
            return pb.TicketCall(hello=pb.Hello())
        case StoreDone(ticket, checksums):
            return pb.TicketCall(store_done=pb.StoreDone(ticket=ticket, checksums=pack(checksums)))
        case LoadDone(ticket, good):
            return pb.TicketCall(load_done=pb.LoadDone(ticket=ticket, good_blocks=good))
        case AbortTicket(ticket):
            return pb.TicketCall(abort=pb.AbortTicket(ticket=ticket))
        case Prefetch(request, keys, blocks):
            return pb.TicketCall(prefetch=pb.Prefetch(request=request, keys=b"".join(keys), blocks=blocks))


def decode_call(message: pb.TicketCall) -> TicketCall | None:
    """The call of a message, None for the hello. InvalidRequest for one that names no call, or wrong bytes."""
    kind = message.WhichOneof("call")
    match kind:
        case "hello":
            return None
        case "store_done":
            done = message.store_done
            return StoreDone(Ticket(done.ticket), unpack(done.checksums, "store_done.checksums"))
        case "load_done":
            return LoadDone(Ticket(message.load_done.ticket), message.load_done.good_blocks)
        case "abort":
            return AbortTicket(Ticket(message.abort.ticket))
        case "prefetch":
            wanted = message.prefetch
            return Prefetch(RequestId(wanted.request), split_keys(wanted.keys, "prefetch.keys"), wanted.blocks)
        case _:
            raise InvalidRequest("the ticket call names no call", field="call")


def encode_event(event: TicketEvent) -> pb.TicketEvent:
    """The event as a message."""
    match event:
        case StoreOrder(ticket, blocks, slots, urgent):
            order = pb.StoreOrder(ticket=ticket, blocks=pack(blocks), slots=pack(slots), urgent=urgent)
            return pb.TicketEvent(store=order)
        case LoadReady(ticket, request, first, slots, checksums):
            ready = pb.LoadReady(
                ticket=ticket, request=request, first=first, slots=pack(slots), checksums=pack(checksums)
            )
            return pb.TicketEvent(load=ready)
        case TicketLost(ticket, first):
            return pb.TicketEvent(lost=pb.TicketLost(ticket=ticket, first=first))


def decode_event(message: pb.TicketEvent) -> TicketEvent:
    """The event of a message. InvalidRequest for one that names no event, or wrong bytes."""
    match message.WhichOneof("event"):
        case "store":
            order = message.store
            blocks = handles(order.blocks, "store.blocks")
            return StoreOrder(Ticket(order.ticket), blocks, _slots(order.slots, "store.slots"), order.urgent)
        case "load":
            ready = message.load
            return LoadReady(
                Ticket(ready.ticket),
                RequestId(ready.request),
                ready.first,
                _slots(ready.slots, "load.slots"),
                unpack(ready.checksums, "load.checksums"),
            )
        case "lost":
            return TicketLost(Ticket(message.lost.ticket), message.lost.first)
        case _:
            raise InvalidRequest("the ticket event names no event", field="event")


def _slots(data: bytes, field: str) -> list[Slot]:
    return [Slot(slot) for slot in unpack(data, field)]
