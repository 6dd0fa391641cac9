"""The real ledger and the real lower tiers behind a virtual wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from cache_svc.audit import audit
from cache_svc.blocks import BlockTable
from cache_svc.disk_jobs import DiskHeader, DiskJob, DiskWrite
from cache_svc.ledger import Ledger
from cache_svc.redeclare import restored
from cache_svc.tiers import Owner, TierLimits, Tiers
from executor_svc.ports import CacheState, Fenced, Reopened
from jitney.block_ops import Batch, BatchAnswer, Chain, ChainHits
from jitney.ticket_ops import TicketCall, TicketEvent
from simulator.clock import VirtualClock
from simulator.copies import VirtualCopies
from simulator.disk import VirtualDisk
from simulator.slots import Slots
from simulator.tiers import TierModel

FINGERPRINT = b"counting"
NAME = "simulated"


def never_lost(_: TicketCall) -> bool:
    """All calls arrive."""
    return False


class LowerTiers:
    """The tiers of one start of the cache, with the CPU tier's bytes; `disk` outlives it."""

    def __init__(self, clock: VirtualClock, model: TierModel, block_tokens: int, disk: VirtualDisk) -> None:
        self._clock, self._disk = clock, disk
        self.tiers = Tiers(model.limits)
        self.slots = Slots(model.limits.cpu_slots, block_tokens)
        self.changed: Callable[[], None] = lambda: None
        self.dead = False

    def find(self) -> None:
        """What the SSD has of earlier starts."""
        for slot, entry in list(self._disk.headers.items()):
            self.tiers.found(slot, entry)

    def work(self) -> None:
        """Starts what the tiers want done."""
        self.tiers.pump()
        for slot, generation in self.tiers.take_generations():
            self.slots.generations[slot] = generation
        for job in self.tiers.take_jobs():
            self._disk.put(job, self.slots, self._reported)

    def _reported(self, job: DiskJob, ok: bool) -> None:
        if self.dead or isinstance(job, DiskHeader):
            return
        self.tiers.now_us = self._clock.now_us()
        (self.tiers.written if isinstance(job, DiskWrite) else self.tiers.read)(job.job, ok=ok)
        self.changed()


class VirtualCache:
    """CachePort on the virtual clock. Audits the ledger after every batch. Without `tiers` nothing is below the device.

    `loses` says which of the executor's ticket calls never arrive.
    """

    def __init__(
        self,
        clock: VirtualClock,
        pool_blocks: int,
        block_tokens: int,
        latency_us: int = 500,
        tiers: TierModel | None = None,
    ) -> None:
        self._clock = clock
        self._pool_blocks = pool_blocks
        self._block_tokens = block_tokens
        self._model = tiers or TierModel(TierLimits())
        self.latency_us = latency_us
        self.disk = VirtualDisk(clock, self._model, block_tokens)
        self.copies: VirtualCopies | None = None
        self.loses: Callable[[TicketCall], bool] = never_lost
        self.state: CacheState | None = None
        self.audits = True
        self._boots = 0
        self._op_seq = 0
        self._unanswered = 0
        self._telling = self._pushing = 0  # ticket calls and pushes on their way
        self._events: deque[BatchAnswer | Reopened | Callable[[], Reopened]] = deque()
        self._tickets: deque[TicketEvent] = deque()
        self._hits: Sequence[tuple[Chain, ChainHits]] | None = None
        self._down = False
        self.lower = self._started()
        self.ledger = Ledger(BlockTable(pool_blocks), block_tokens, self.lower.tiers, self._owner, FINGERPRINT)

    @property
    def _owner(self) -> Owner:
        return NAME, self._boots

    @property
    def connected(self) -> bool:
        """Whether the cache answers."""
        return not self._down

    @property
    def unanswered(self) -> int:
        """Batches sent and not yet answered."""
        return self._unanswered

    def send(self, batch: Batch) -> None:
        """Applied after half the latency, answered after all of it."""
        self._unanswered += 1
        self._op_seq += 1
        numbered, boot = replace(batch, op_seq=self._op_seq), self._boots

        def arrive() -> None:
            if boot != self._boots or self._down:
                return
            self.lower.tiers.now_us = self._clock.now_us()
            answer = self._with_rates(self.ledger.apply(numbered))
            self._clock.after(self.latency_us - self.latency_us // 2, lambda: self._answer(boot, answer))
            self._work()

        self._clock.after(self.latency_us // 2, arrive)

    def _with_rates(self, answer: BatchAnswer) -> BatchAnswer:
        write, read = (int(link.measured) for link in (self.disk.write, self.disk.read))
        return replace(answer, lower=replace(answer.lower, ssd_write_bytes_per_s=write, ssd_read_bytes_per_s=read))

    def _answer(self, boot: int, answer: BatchAnswer) -> None:
        if boot == self._boots and not self._down:
            self._unanswered -= 1
            self._events.append(answer)

    def _work(self) -> None:
        """What follows from a change: disk jobs start, tickets are pushed."""
        self.lower.work()
        events = self.lower.tiers.take_events(self._owner)
        if events:
            self._push(events)
        self._audit()

    def _push(self, events: Sequence[TicketEvent]) -> None:
        boot = self._boots
        self._pushing += 1

        def arrive() -> None:
            self._pushing -= 1
            if boot == self._boots and not self._down:
                self._tickets += events

        self._clock.after(self.latency_us // 2, arrive)

    def _audit(self) -> None:
        findings = audit(self.ledger, contents=False) if self.audits else ()
        if findings:
            raise AssertionError("; ".join(str(f) for f in findings))

    def poll(self) -> BatchAnswer | Reopened | Fenced | None:
        """The next answer or event."""
        if not self._events:
            return None
        event = self._events.popleft()
        return event() if callable(event) else event

    def lookup(self, chains: Sequence[Chain]) -> None:
        """Answered after the latency."""
        boot = self._boots

        def answer() -> None:
            down = self._down or boot != self._boots
            self._hits = [] if down else [(chain, self.ledger.lookup(chain)) for chain in chains]

        self._clock.after(self.latency_us, answer)

    def poll_hits(self) -> Sequence[tuple[Chain, ChainHits]] | None:
        """The hits of the last lookup, once."""
        hits, self._hits = self._hits, None
        return hits

    def tell(self, call: TicketCall) -> None:
        """Arrives after half the latency, if it is not lost."""
        boot = self._boots
        if self.loses(call):
            return

        self._telling += 1

        def arrive() -> None:
            self._telling -= 1
            if boot == self._boots and not self._down:
                self.lower.tiers.now_us = self._clock.now_us()
                self.lower.tiers.told(self._owner, call)
                self._work()

        self._clock.after(self.latency_us // 2, arrive)

    def poll_ticket(self) -> TicketEvent | None:
        """The next order or offer."""
        return self._tickets.popleft() if self._tickets else None

    def break_stream(self) -> None:
        """The tickets' stream breaks and is opened anew: all that is open is pushed again."""
        self._tickets.clear()
        self._push(self.lower.tiers.open_events(self._owner))

    def connect(self, copies: VirtualCopies) -> None:
        """The executor maps the CPU tier."""
        self.copies = copies
        copies.put_in(self.lower.slots)

    @property
    def copying(self) -> bool:
        """Whether anything is on its way between tiers, or is to be told of."""
        copies = self.copies is not None and self.copies.busy
        return copies or self.disk.busy or bool(self._tickets or self._telling or self._pushing)

    def check_clean(self) -> None:
        """Nothing waits for anybody. Raises AssertionError with what is left."""
        assert not self.lower.tiers.open_events(self._owner)
        usage = self.lower.tiers.usage()
        for tier in (usage.cpu, usage.ssd):
            assert not tier.pinned and not tier.retired, usage

    def crash(self, back_after_us: int) -> None:
        """Loses everything but the SSD now; is there again, and told our blocks, after a while."""
        self._down = True
        self._boots += 1
        self._events.clear()
        self._tickets.clear()
        self.lower.dead = True
        self.disk.abandon()
        self._clock.after(back_after_us, self._restart)

    def _restart(self) -> None:
        self._down = False
        self._events.append(self._redeclare)

    def _redeclare(self) -> Reopened:
        assert self.state is not None
        self._boots += 1  # what was sent before is void
        self._unanswered = 0
        self._op_seq = 0
        self.lower = self._started()
        declared = self.state.declare()
        self.ledger = restored(
            self._pool_blocks, self._block_tokens, declared, self.lower.tiers, self._owner, FINGERPRINT
        )
        self._work()
        return Reopened(self.ledger.blocks.counts())

    def _started(self) -> LowerTiers:
        """Empty tiers; what the SSD has is found a little later."""
        lower = LowerTiers(self._clock, self._model, self._block_tokens, self.disk)
        lower.changed = self._work
        if self.copies is not None:
            self.copies.put_in(lower.slots)
        self._clock.after(self.latency_us, lower.find)
        return lower
