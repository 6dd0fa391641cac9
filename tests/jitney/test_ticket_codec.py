"""Tickets survive the wire, and what cannot be one is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.block_ops import Block, RequestId
from jitney.cache.v1 import cache_pb2 as pb
from jitney.errors import InvalidRequest
from jitney.keys import KEY_BYTES, Key
from jitney.ticket_codec import decode_call, decode_event, encode_call, encode_event
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

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
TICKET, REQUEST = U64.map(Ticket), U64.map(RequestId)
KEY = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES).map(Key)


def some(of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, max_size=3)


CALL = st.one_of(
    st.none(),
    st.builds(StoreDone, TICKET, some(U64)),
    st.builds(LoadDone, TICKET, U32),
    st.builds(AbortTicket, TICKET),
    st.builds(Prefetch, REQUEST, some(KEY), U32),
)
EVENT = st.one_of(
    st.builds(StoreOrder, TICKET, some(U64.map(Block)), some(U64.map(Slot)), st.booleans()),
    st.builds(LoadReady, TICKET, REQUEST, U32, some(U64.map(Slot)), some(U64)),
    st.builds(TicketLost, TICKET, U32),
)


@settings(max_examples=60, deadline=None)
@given(CALL)
def test_calls(call: TicketCall | None) -> None:
    assert decode_call(pb.TicketCall.FromString(encode_call(call).SerializeToString())) == call


@settings(max_examples=60, deadline=None)
@given(EVENT)
def test_events(event: TicketEvent) -> None:
    assert decode_event(pb.TicketEvent.FromString(encode_event(event).SerializeToString())) == event


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.TicketCall(), "call"),
        (pb.TicketCall(store_done=pb.StoreDone(checksums=b"1234567")), "store_done.checksums"),
        (pb.TicketCall(prefetch=pb.Prefetch(keys=b"k" * 33)), "prefetch.keys"),
        (pb.TicketEvent(), "event"),
        (pb.TicketEvent(store=pb.StoreOrder(blocks=b"1")), "store.blocks"),
        (pb.TicketEvent(load=pb.LoadReady(slots=b"1")), "load.slots"),
    ],
)
def test_what_cannot_be_one(message: Any, field: str) -> None:
    decode = decode_call if isinstance(message, pb.TicketCall) else decode_event
    with pytest.raises(InvalidRequest) as caught:
        decode(message)
    assert caught.value.field == field
