"""What lies below the device of one executor, as its ledger sees it: look up, load, swap, keep, and tend at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cache_svc.blocks import ID_MASK, BlockTable
from cache_svc.loads import Loads, Waiting
from cache_svc.lower import Lower
from cache_svc.pins import Owner
from cache_svc.stores import Stores
from cache_svc.tickets import Load, Store, Tickets
from jitney.block_ops import LowerTiers, RequestId, Room, Tier
from jitney.keys import Key
from jitney.ticket_ops import AbortTicket, LoadDone, Prefetch, StoreDone, TicketCall, TicketEvent

Filling = dict[int, tuple[Stores, Store, int]]


@dataclass(frozen=True, slots=True)
class Opened:
    """A load that was begun: its number, and how many of its blocks come from which tier."""

    ticket: int
    cpu_blocks: int
    ssd_blocks: int


class Below:
    """One epoch of one executor. Once it is `fenced` there is nothing below, should the executor go on all the same."""

    def __init__(
        self,
        lower: Lower,
        waiting: Waiting,
        filling: Filling,
        owner: Owner,
        table: BlockTable,
        fingerprint: bytes,
    ) -> None:
        self.lower = lower
        self.owner = owner
        self.table = table
        self.tickets = Tickets()
        self.loads = Loads(lower, waiting, table, self.tickets)
        self.stores = Stores(lower, filling, table, self.tickets, fingerprint)
        self.fenced = False
        self.keeps = lower.has_ssd
        self.interval_blocks = lower.limits.interval_blocks
        table.evicting = self._evicting

    # What the ledger asks.

    def hits(self, keys: Sequence[Key]) -> tuple[int, int]:
        """Blocks at the start of `keys` that can be loaded: of the CPU tier, and of the SSD only."""
        run = [] if self.fenced else self.loads.run(keys)
        cpu = sum(run)
        return cpu, len(run) - cpu

    def load(self, request: RequestId, keys: Sequence[Key], blocks: Sequence[int], most: int) -> Opened | None:
        """Begins to load the first of `keys`, at most `most`, into `blocks`."""
        load = None if self.fenced else self.loads.open(request, keys, blocks, most)
        if load is None:
            return None
        ssd = sum(load.from_ssd)
        return Opened(load.ticket, len(load.slots) - ssd, ssd)

    def boarded(self, request: RequestId) -> None:
        """The request has what it needs: its pins end."""
        if self.lower.pins.requests:
            self.lower.pins.end((self.owner, request))

    def released(self, request: RequestId) -> bool:
        """The request wants nothing any more; whether it had pins."""
        return bool(self.lower.pins.requests) and self.lower.pins.end((self.owner, request))

    def keep(self, block: int) -> None:
        """A hit may end behind this sealed device block also when only the SSD is left."""
        if self.keeps:
            self.stores.keep(block)

    def swap(self, request: RequestId, chain: Sequence[int], tier: Tier) -> tuple[int, int]:
        """Pins the sealed device blocks of a chain, from its start on, in `tier`, and orders what is not there yet.

        Returns how many were pinned, and how many of these are still to be stored: they stay pinned on the device.
        """
        lower = self.lower
        table = lower.cpu if tier is Tier.CPU else lower.ssd
        if self.fenced or not chain or not (lower.has_cpu_tier if tier is Tier.CPU else lower.has_ssd):
            return 0, 0
        keys = [self.stores.entry(block).key for block in chain]
        swapped = (self.owner, request)
        count = lower.pins.pin(swapped, table, keys, lower.now_us)
        move = self._to_cpu if tier is Tier.CPU else self._to_ssd
        pinned, leaving = move(chain[:count], keys[:count])
        if pinned < count:
            lower.pins.shorten(swapped, pinned)
        if tier is Tier.SSD and pinned:
            lower.disk.keep(keys[pinned - 1], place=True)
        lower.disk.pump()
        self.stores.tend()
        return pinned, leaving

    def _to_cpu(self, chain: Sequence[int], keys: Sequence[Key]) -> tuple[int, int]:
        lower = self.lower
        blocks: list[int] = []
        slots: list[int] = []
        held = 0
        pinned = len(chain)
        for at, (block, key) in enumerate(zip(chain, keys, strict=True)):
            if key in lower.cpu.index.sealed or key in lower.disk.reading:
                continue
            slot = self.stores.under_way(key)
            if slot is not None:
                held += self.stores.hold(block, slot)
                continue
            slot = self.stores.take(block)
            if slot is None:
                pinned = at
                break
            blocks.append(block)
            slots.append(slot)
        self.table.pin(blocks)
        self.stores.order(blocks[::-1], slots[::-1], urgent=True)
        return pinned, len(blocks) + held

    def _to_ssd(self, chain: Sequence[int], keys: Sequence[Key]) -> tuple[int, int]:
        lower, leaving = self.lower, 0
        for at, (block, key) in enumerate(zip(chain, keys, strict=True)):
            if lower.disk.has(key):
                continue
            slot = self.stores.under_way(key)
            if not lower.disk.reserve(self.stores.entry(block)):
                return at, leaving
            if slot is not None:
                leaving += self.stores.hold(block, slot)
            elif key not in lower.cpu.index.sealed:
                self.table.pin((block,))
                self.stores.waiting.append((block, key))
                leaving += 1
        return len(chain), leaving

    def swap_over(self) -> None:
        """Pins have gone: what waits to be stored for nobody is let go."""
        pinned = self.lower.ssd.pinned
        if self.stores.waiting:
            self.stores.drop_waiting(lambda key: key not in pinned)

    def tend(self) -> LowerTiers:
        """Orders what there is room for; how much room is left."""
        if self.fenced:
            return LowerTiers()
        self.lower.pins.expire(self.lower.now_us)
        self.stores.demotion.stepped()
        self.lower.disk.pump()
        self.stores.tend()
        return LowerTiers(*room(self.lower))

    def _evicting(self, blocks: Sequence[int]) -> None:
        lower, key = self.lower, self.table.index.key
        lower.unstored += sum(not lower.has(key[block]) for block in blocks)

    # What the executor says.

    def told(self, call: TicketCall) -> bool:
        """Takes what the executor says; whether entries of the CPU tier turned out to be bad and went."""
        if isinstance(call, Prefetch):
            self._prefetch(call)
            return False
        ticket = self.tickets.answered(call.ticket)
        bad: int | None = None
        match ticket, call:
            case Store(), StoreDone():
                self.stores.done(ticket, call.checksums)
            case Store(), AbortTicket():
                self.stores.abort(ticket)
            case Load(), LoadDone():
                bad = self.loads.done(ticket, call.good_blocks)
                if bad is not None:
                    self.lower.bad(bad)
                self.loads.end(ticket)
            case Load(), AbortTicket():
                self.loads.end(ticket)
            case _:
                pass  # it has ended before, or the answer is of the wrong kind and says nothing
        return bad is not None

    def _prefetch(self, call: Prefetch) -> None:
        """Reads what the SSD has behind the device's run, as far as nobody has to wait for it."""
        lower, index = self.lower, self.table.index
        left = call.blocks
        for key in call.keys[len(index.find(call.keys)) :]:
            if left <= 0 or len(lower.disk.jobs) >= lower.limits.disk_jobs_in_flight:
                return
            if key in lower.cpu.index.sealed or key in lower.disk.reading:
                continue
            if lower.ssd.find(key) is None or lower.disk.read(key, urgent=False) is None:
                return
            left -= 1

    def device_pins(self) -> Counter[int]:
        """How many copies need which device block to stay."""
        pins = Counter(block for block, _ in self.stores.waiting)
        for ticket in self.tickets.open.values():
            if isinstance(ticket, Load):
                pins.update(ticket.targets)
            else:
                pins.update(block & ID_MASK for block, pin in zip(ticket.blocks, ticket.pinned, strict=True) if pin)
        return pins

    def open_events(self) -> list[TicketEvent]:
        """Everything open, for an executor that may have missed it."""
        self.tickets.take_events()
        told: list[TicketEvent] = []
        for ticket in self.tickets.open.values():
            told += [self.stores.again(ticket)] if isinstance(ticket, Store) else self.loads.again(ticket)
        return told

    def fence(self) -> None:
        """The epoch is over: nothing is loaded or pinned for it any more; its stores keep their slots."""
        self.fenced, self.keeps = True, False
        self.lower.pins.end_all(self.owner)
        self.stores.drop_waiting(lambda _: True)
        self.stores.drop_wanted()
        for ticket in list(self.tickets.open.values()):
            if isinstance(ticket, Load):
                self.loads.end(ticket)
            else:
                self.stores.void(ticket)
        self.tickets.take_events()

    def gone(self) -> None:
        """Its process touches nothing any more."""
        self.fence()
        for ticket in list(self.tickets.open.values()):
            if isinstance(ticket, Store):
                self.stores.abort(ticket)


def room(lower: Lower) -> tuple[Room, Room]:
    """CPU tier and SSD: blocks that can be stored, that can be pinned, and that wait.

    What waits: of the CPU tier, for the answer of an executor; of the SSD, to be read or written.
    """
    cpu, ssd, disk = lower.cpu, lower.ssd, lower.disk
    waiting = len(lower.storing)
    return (
        Room(cpu.available, lower.pins.room(cpu), waiting) if lower.has_cpu_tier else Room(queue_blocks=waiting),
        Room(ssd.available, lower.pins.room(ssd), len(disk.jobs) + len(disk.queue)) if lower.has_ssd else Room(),
    )
