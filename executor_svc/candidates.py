"""The waiting requests that are likely next: hashed and looked up off the loop, at most 64 at a time.

Hits grow old as blocks come and go; a candidate is looked up again after a while, and at once when it did not get the
blocks that its hits had promised. A request that boards without a look-up loses nothing: its Acquire names the whole
chain. So one look-up every few steps is enough, unless one of the first in line is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_svc.live_request import LiveRequest
from executor_svc.ports import CachePort, Hasher
from executor_svc.registry import Registry
from executor_svc.tails import host_of, joining
from jitney.block_ops import Chain, ChainHits
from jitney.columns import U64, CandidateTable
from jitney.snapshot import MAX_CANDIDATES

STALE_AFTER_STEPS = 8
LOOKUP_PATIENCE_US = 20_000
"""So long a machine on which nothing runs waits for a look-up before it admits anybody."""
_NEWEST = 16
_FIRST = 16
"""So many of the line may board soon: they are looked up at once."""
NONE = (ChainHits(), 0)


class Candidates:
    """The order of the last decision plus the newest arrivals, with what the cache has of each."""

    def __init__(self, registry: Registry, cache: CachePort, hasher: Hasher, block_tokens: int) -> None:
        self._registry = registry
        self._cache = cache
        self._hasher = hasher
        self._block_tokens = block_tokens
        self._order: Sequence[int] = ()
        self._hits: dict[int, tuple[ChainHits, int]] = {}
        self._choices: Sequence[LiveRequest] = ()  # of the candidates, those with siblings
        self.hashing = False  # whether the keys of one were missing at the last look
        self._asked = False
        self._asked_us = 0  # when the loop first waited for the look-up on its way
        self._asked_step = -STALE_AFTER_STEPS
        self._table: CandidateTable | None = None  # until hits or who waits change
        self._table_of = -1

    def follow(self, order: U64) -> None:
        """The order that the last decision named."""
        self._order = order.tolist()

    def _current(self) -> list[LiveRequest]:
        named = [r for i in self._order if (r := self._registry.by_id.get(i)) and r.waits]
        seen = {r.id for r in named}
        newest = [r for r in self._registry.newest_waiting(_NEWEST) if r.id not in seen]
        return [*named[: MAX_CANDIDATES - len(newest)], *newest]

    def refresh(self, step: int) -> None:
        """Hashes and looks up the candidates whose hits are missing or old, and forgets the hits of all others."""
        if self._asked or not self._is_due(step):
            return
        current = self._current()
        self._hits = {r.id: self._hits[r.id] for r in current if r.id in self._hits and r.known_hits >= 0}
        self._choices = [r for r in current if r.siblings]
        self._table = None
        chains = []
        self.hashing = False
        for request in current:
            known = self._hits.get(request.id)
            if known and step - known[1] < STALE_AFTER_STEPS:
                continue
            if self._hasher.ready(request):
                chains.append(Chain(request.id, request.hash_to(request.length, self._block_tokens)))
            else:
                self.hashing = True
        if chains:
            self._asked, self._asked_step = True, step
            self._cache.lookup(chains)

    def _is_due(self, step: int) -> bool:
        """Whether hits grow old, or are unknown where they are wanted next."""
        if step - self._asked_step >= STALE_AFTER_STEPS:
            return True
        first = self._order[:_FIRST] or [request.id for request in self._registry.newest_waiting(_FIRST)]
        return any(self._waits(request) and not self._knows(request) for request in first)

    def _knows(self, request_id: int) -> bool:
        return request_id in self._hits and self._registry.by_id[request_id].known_hits >= 0

    def looked_up_after(self, now_us: int) -> int:
        """Until when it is worth to wait for keys and look-ups that are on their way; 0: none are, or they are late."""
        if not (self._asked or self.hashing) or not self._cache.connected:
            self._asked_us = 0
            return 0
        self._asked_us = self._asked_us or now_us
        until = self._asked_us + LOOKUP_PATIENCE_US
        return until if now_us < until else 0

    def take_hits(self, step: int) -> bool:
        """Takes the answer to the last look-up; whether there was one."""
        found = self._cache.poll_hits()
        if found is None:
            return False
        self._asked, self._asked_us = False, 0
        for chain, hits in found:
            request = self._registry.by_id.get(chain.request)
            if request and request.waits:
                self._hits[request.id] = (hits, step)
                self._table = None
                request.known_hits = hits.device_blocks
        return bool(found)

    def requests(self) -> list[LiveRequest]:
        """The candidates that were looked up and wait."""
        return [self._registry.by_id[i] for i in self._hits if self._waits(i)]

    def table(self) -> CandidateTable:
        """The candidates that were looked up."""
        if self._choices or self._table is None or self._table_of != self._registry.waiting_changes:
            self._table, self._table_of = self._new_table(), self._registry.waiting_changes
        return self._table

    def _new_table(self) -> CandidateTable:
        hosts = [(r, host) for r in self._choices if (host := host_of(r)) is not None]
        found = self._hits | {r.id: (joining(self._hits.get(r.id, NONE)[0], host.id), 0) for r, host in hosts}
        rows = [(i, h, s) for i, (h, s) in found.items() if self._waits(i)]
        return CandidateTable(
            id=np.array([i for i, _, _ in rows], np.uint64),
            device_hit_blocks=np.array([h.device_blocks for _, h, _ in rows], np.int32),
            unheld_hit_blocks=np.array([h.unheld_blocks for _, h, _ in rows], np.int32),
            cpu_hit_blocks=np.array([h.cpu_blocks for _, h, _ in rows], np.int32),
            ssd_hit_blocks=np.array([h.ssd_blocks for _, h, _ in rows], np.int32),
            pending_blocks=np.array([h.pending_blocks for _, h, _ in rows], np.int32),
            pending_owner=np.array([h.pending_owner for _, h, _ in rows], np.uint64),
            lookup_step=np.array([s for _, _, s in rows], np.uint64),
            features=np.array([self._registry.features[self._registry.by_id[i].slot] for i, _, _ in rows], np.uint64),
        )

    def _waits(self, request_id: int) -> bool:
        request = self._registry.by_id.get(request_id)
        return request is not None and request.waits
