"""Copies between the device and the CPU tier: what the cache ordered or offered, and what became of it.

Stores are copied as they are ordered: their blocks are sealed, nobody writes them. An order that comes again as an
urgent one goes before others from then on. A load writes blocks that a step in flight may still read for whoever had
them before: it starts once the step that was in flight when they were bound has ended. A row runs no token until its
load has ended; what it then has in whole blocks is sealed with the next batch, as if it had computed it, and what did
not come or was bad is computed.

A request that ends while its load is being copied is let go when the copies have ended: until then its `load` is set.
After a restart of the cache, loads that are under way end for themselves and nobody is told. Stores end before the
device's blocks are declared: the cache may give their slots to others then.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from executor_svc.blocks import DeviceBlocks
from executor_svc.live_request import LiveRequest, State
from executor_svc.load import Load
from executor_svc.ports import CachePort, CopyPort, LoadCopied, StoreCopied
from jitney.block_ops import ReserveResult, Segment
from jitney.ticket_ops import AbortTicket, LoadDone, StoreDone, StoreOrder, Ticket, TicketCall, TicketEvent, TicketLost

log = structlog.get_logger()
KEPT = 1024
"""Answers that may be asked for again, and tickets whose request is not known yet."""


class Copying:
    """Open tickets and their copies."""

    def __init__(self, blocks: DeviceBlocks, cache: CachePort, copies: CopyPort) -> None:
        self._blocks = blocks
        self._cache = cache
        self._copies = copies
        self._loads: dict[Ticket, tuple[LiveRequest, Load]] = {}
        self._void: list[tuple[LiveRequest, Load]] = []  # of a cache that is gone
        self._stores: dict[Ticket, int] = {}  # the job of each
        self._jobs: dict[int, StoreOrder | Load] = {}
        self._early: dict[Ticket, list[TicketEvent]] = {}  # came before the answer that names the request
        self._answered: dict[Ticket, TicketCall] = {}
        self._last_job = 0
        self._blind = False  # the segments of the cache that is open cannot be mapped

    @property
    def loading(self) -> bool:
        """Whether a row waits for its load."""
        return bool(self._loads or self._void)

    @property
    def storing(self) -> bool:
        """Whether slots are being filled."""
        return any(isinstance(what, StoreOrder) for what in self._jobs.values())

    def expect(self, request: LiveRequest, reserved: ReserveResult, step_in_flight: int) -> None:
        """The first blocks that a Reserve bound are to be loaded. `step_in_flight`: 0 none."""
        count = reserved.cpu_blocks + reserved.ssd_blocks
        ticket = Ticket(reserved.ticket)
        load = Load(ticket, reserved.blocks[:count], reserved.cpu_blocks, step_in_flight, count)
        request.load = load
        self._loads[ticket] = (request, load)
        for event in self._early.pop(ticket, ()):
            self._heard(event)

    def refuse(self, reserved: ReserveResult) -> None:
        """The request that a load was opened for is gone."""
        if reserved.ticket:
            ticket = Ticket(reserved.ticket)
            self._early.pop(ticket, None)
            self._answer(ticket, AbortTicket(ticket))

    def turn(self, step_in_flight: int, now_us: int) -> list[tuple[LiveRequest, Load]]:
        """Hears the cache and the copies and starts what may start; the loads that ended of requests that live."""
        while (event := self._cache.poll_ticket()) is not None:
            self._heard(event)
        while (copied := self._copies.poll()) is not None:
            self._copied(copied)
        if not self.loading:
            return []
        ended = []
        for request, load in [*self._loads.values(), *self._void]:
            load.cancelled = request.state is State.ENDED
            self._start(load, step_in_flight)
            load.wait(now_us)
            if load.over:
                self._end(request, load)
                if not load.cancelled:
                    ended.append((request, load))
        return ended

    def attach(self, segments: Sequence[Segment]) -> None:
        """Copies to and from these from here on. Where they cannot be mapped, as the cache has gone again meanwhile and
        its files with it, tickets are given back: what they would load is computed."""
        self._blind = False
        try:
            self._copies.attach(segments)
        except OSError as error:
            self._blind = True
            log.warning("the cache's memory cannot be mapped", error=str(error))

    def reopened(self) -> None:
        """The cache was restarted: its tickets mean nothing any more."""
        for _, load in self._loads.values():
            load.void = True
        self._blocks.forget_stored()
        self._void += self._loads.values()
        for table in (self._loads, self._stores, self._early, self._answered):
            table.clear()

    def _heard(self, event: TicketEvent) -> None:
        ticket = event.ticket
        if ticket in self._answered:
            self._cache.tell(self._answered[ticket])  # it was said on a stream that broke
        elif isinstance(event, StoreOrder):
            if self._blind:
                self._answer(ticket, AbortTicket(ticket))
            elif ticket not in self._stores:
                self._stores[ticket] = self._job(event)
                self._copies.store(self._last_job, event.blocks, event.slots, urgent=event.urgent)
            elif event.urgent:
                self._copies.hurry(self._stores[ticket])
        elif ticket in self._loads:
            load = self._loads[ticket][1]
            if self._blind or isinstance(event, TicketLost):
                load.lost(event.first)
            else:
                load.offer(event)
        elif ticket not in self._stores and len(self._early) < KEPT:  # a store that is withdrawn is answered as ever
            self._early.setdefault(ticket, []).append(event)

    def _start(self, load: Load, step_in_flight: int) -> None:
        if load.cancelled or load.void or load.bad:
            load.stop()
        if not step_in_flight or step_in_flight > load.after_step:
            for part in load.parts:
                targets = load.blocks[part.first : part.first + len(part.slots)]
                load.copying += 1
                self._copies.load(self._job(load), targets, part.slots, part.checksums)
            load.parts.clear()

    def _copied(self, copied: StoreCopied | LoadCopied) -> None:
        what = self._jobs.pop(copied.job)
        if isinstance(copied, LoadCopied):
            assert isinstance(what, Load)
            what.copied(copied.blocks, copied.good)
        else:
            assert isinstance(what, StoreOrder)
            if self._stores.get(what.ticket) == copied.job:
                del self._stores[what.ticket]
                self._blocks.mark_stored(what.blocks)
                self._answer(what.ticket, StoreDone(what.ticket, copied.checksums))

    def _end(self, request: LiveRequest, load: Load) -> None:
        request.load = None
        if load.void:
            self._void.remove((request, load))
            return
        del self._loads[load.ticket]
        if load.cancelled:
            self._answer(load.ticket, AbortTicket(load.ticket))
        else:
            self._blocks.mark_stored(load.blocks[: load.good])
            self._answer(load.ticket, LoadDone(load.ticket, load.good))

    def _answer(self, ticket: Ticket, call: TicketCall) -> None:
        self._cache.tell(call)
        self._answered[ticket] = call
        if len(self._answered) > KEPT:
            del self._answered[next(iter(self._answered))]

    def _job(self, what: StoreOrder | Load) -> int:
        self._last_job += 1
        self._jobs[self._last_job] = what
        return self._last_job
