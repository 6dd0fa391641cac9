"""What executor and cache say to each other about copies between device and CPU tier, as plain values.

Meaning: `protos/jitney/cache/v1/cache.proto`. The cache orders stores (events) and offers loads that a Reserve asked
for; the executor copies and answers each ticket once (calls). A slot is named like a block, by generation << 32 | slot;
`slot_id` is its number in the tier. Checksums are xxh3_64 of the block's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from jitney.block_ops import Block, RequestId
from jitney.keys import Key

Slot = NewType("Slot", int)
Ticket = NewType("Ticket", int)


def slot_id(slot: Slot) -> int:
    """Number of the slot in its tier."""
    return slot & 0xFFFFFFFF


def slot_generation(slot: Slot) -> int:
    """How often the slot had been given to another block before."""
    return slot >> 32


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Copy these device blocks into these slots; `urgent`: somebody waits for the device blocks."""

    ticket: Ticket
    blocks: Sequence[Block]
    slots: Sequence[Slot]
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class LoadReady:
    """The slots of the ticket's blocks from index `first` on can be read."""

    ticket: Ticket
    request: RequestId
    first: int
    slots: Sequence[Slot]
    checksums: Sequence[int]


@dataclass(frozen=True, slots=True)
class TicketLost:
    """What the ticket has from index `first` on will not come; of a store, the order is withdrawn."""

    ticket: Ticket
    first: int = 0


TicketEvent = StoreOrder | LoadReady | TicketLost


@dataclass(frozen=True, slots=True)
class StoreDone:
    """All blocks of the order are in their slots."""

    ticket: Ticket
    checksums: Sequence[int]


@dataclass(frozen=True, slots=True)
class LoadDone:
    """The executor reads the ticket's slots no more; the first `good_blocks` were copied and verified."""

    ticket: Ticket
    good_blocks: int


@dataclass(frozen=True, slots=True)
class AbortTicket:
    """The ticket's copies have ended or never began, and touch nothing any more."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring at most `blocks` that the SSD has of the chain into the CPU tier."""

    request: RequestId
    keys: Sequence[Key]
    blocks: int


TicketCall = StoreDone | LoadDone | AbortTicket | Prefetch
