"""The real ledger behind a virtual wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from cache_svc.audit import audit
from cache_svc.blocks import BlockTable
from cache_svc.ledger import Ledger
from cache_svc.redeclare import restored
from executor_svc.ports import CacheState, Fenced, Reopened
from jitney.block_ops import Batch, BatchAnswer, Chain, ChainHits
from jitney.ticket_ops import TicketCall, TicketEvent
from simulator.clock import VirtualClock


class VirtualCache:
    """CachePort on the virtual clock. Audits the ledger after every batch."""

    def __init__(self, clock: VirtualClock, pool_blocks: int, block_tokens: int, latency_us: int = 500) -> None:
        self._clock = clock
        self._pool_blocks = pool_blocks
        self._block_tokens = block_tokens
        self.latency_us = latency_us
        self.ledger = Ledger(BlockTable(pool_blocks), block_tokens)
        self.state: CacheState | None = None
        self.audits = True
        self._boots = 0
        self._op_seq = 0
        self._unanswered = 0
        self._events: deque[BatchAnswer | Reopened | Callable[[], Reopened]] = deque()
        self._hits: Sequence[tuple[Chain, ChainHits]] | None = None
        self._down = False

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
            answer = self.ledger.apply(numbered)
            self._audit()
            self._clock.after(self.latency_us - self.latency_us // 2, lambda: self._answer(boot, answer))

        self._clock.after(self.latency_us // 2, arrive)

    def _answer(self, boot: int, answer: BatchAnswer) -> None:
        if boot == self._boots and not self._down:
            self._unanswered -= 1
            self._events.append(answer)

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
        """There are no tickets."""

    def poll_ticket(self) -> TicketEvent | None:
        """There are no tickets."""
        return None

    def crash(self, back_after_us: int) -> None:
        """Loses everything now; is there again, and told our blocks, after a while."""
        self._down = True
        self._boots += 1
        self._events.clear()
        self._clock.after(back_after_us, self._restart)

    def _restart(self) -> None:
        self._down = False
        self._events.append(self._redeclare)

    def _redeclare(self) -> Reopened:
        assert self.state is not None
        self._boots += 1  # what was sent before is void
        self._unanswered = 0
        self._op_seq = 0
        self.ledger = restored(self._pool_blocks, self._block_tokens, self.state.declare())
        self._audit()
        return Reopened(self.ledger.blocks.counts())
