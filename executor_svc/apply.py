"""What the executor tells the cache each step, and what it makes of the answers.

One batch a step carries, in this order: seals of blocks that the last completed step filled, releases of rows that
left, binds of granted blocks, unneeded grants given back, and for each boarding request an Acquire of its whole chain
and a Reserve of the rest. A request whose Acquire or Reserve falls short goes back to waiting at its place, holding
nothing; so does one that had joined a prefix that nobody computes any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from executor_svc.blocks import DeviceBlocks
from executor_svc.copying import Copying
from executor_svc.declaration import declaration
from executor_svc.live_request import UNKNOWN_BLOCK, LiveRequest, State
from executor_svc.load import Load
from executor_svc.moves import Admission, Victim
from executor_svc.registry import Registry, slots_of
from executor_svc.tails import TailOps, Tails
from jitney.block_ops import (
    Acquire,
    Batch,
    BatchAnswer,
    Bind,
    Block,
    Counts,
    DeclaredBlock,
    LowerTiers,
    Release,
    RequestId,
    Reserve,
    ResultCode,
    Return,
    Seal,
    Swap,
)

GRANT_LOOKAHEAD_TOKENS = 2
"""Decode blocks are asked for so many tokens before they are written."""


@dataclass(slots=True)
class Boarding:
    """A request whose Acquire and Reserve are on the way; `boardings` tells a later boarding from this one."""

    request: LiveRequest
    boardings: int

    @property
    def current(self) -> bool:
        """Whether the answer still concerns the request: it has not left, ended or boarded again since."""
        expected = self.request.state in (State.BOARDING, State.STANDBY)
        return expected and self.request.boardings == self.boardings


@dataclass(slots=True)
class Sent:
    """What the answer to a batch belongs to."""

    boarding: list[Boarding] = field(default_factory=list)
    promised_blocks: int = 0
    parting_blocks: int = 0
    tails: TailOps = field(default_factory=TailOps)


class Apply:
    """Composes batches and applies answers; owns what is still to be told."""

    def __init__(self, registry: Registry, blocks: DeviceBlocks, copying: Copying) -> None:
        self._registry = registry
        self._blocks = blocks
        self.tails = Tails(registry, blocks)
        self._left: list[LiveRequest] = []  # ended: to seal, release and forget
        self._untold: dict[RequestId, list[Block]] = {}  # granted blocks taken, whose Bind is not sent
        self._returns: list[Block] = []
        self._releases: list[Release] = []
        self._seals: list[Seal] = []  # of substitutes that were dismissed
        self._swaps: list[Swap] = []
        self._parting_blocks = 0  # of the batch that is being composed
        self._sent: deque[Sent] = deque()
        self.copying = copying
        self.counts = Counts(free=blocks.pool_blocks, total=blocks.pool_blocks)  # a pool just opened
        self.lower = LowerTiers()

    @property
    def boarding(self) -> bool:
        """Whether an Acquire or Reserve is unanswered."""
        return any(sent.boarding for sent in self._sent)

    @property
    def promised_blocks(self) -> int:
        """Blocks that unanswered batches will take out of free and evictable."""
        return sum(sent.promised_blocks for sent in self._sent)

    @property
    def parting_blocks(self) -> int:
        """Blocks that requests have let go of, or that are to be stored, while the cache has not said what became of
        them: at most so many come free."""
        return sum(sent.parting_blocks for sent in self._sent)

    def bind(self, request: LiveRequest, blocks: Sequence[Block]) -> None:
        """Tells with the next batch that granted blocks are the request's."""
        self._untold.setdefault(request.id, []).extend(blocks)

    def leave(self, request: LiveRequest) -> None:
        """An ended request whose last launched step is over: the next batch seals, releases and forgets it."""
        self._left.append(request)

    def preempt(self, victim: Victim, seals: list[Seal]) -> None:
        """A victim loses its row at once: what is complete is sealed; all is released, or stored lower down."""
        request = victim.request
        seals += self._seals_of(request)
        if victim.tier is None:
            self._let_go(request)
        else:
            self._swaps.append(Swap(request.id, victim.tier))
            self._forget_blocks(request)
        self._registry.preemptions[request.slot] = min(255, int(self._registry.preemptions[request.slot]) + 1)
        self._registry.back_to_waiting(request)

    def _let_go(self, request: LiveRequest) -> None:
        """The next batch releases all that the request holds; what it took from the grant untold goes back."""
        self._releases.append(Release(request.id, generated_tokens=request.generated))
        self._forget_blocks(request)

    def _forget_blocks(self, request: LiveRequest) -> None:
        self._returns += self._untold.pop(request.id, [])
        self._parting_blocks += len(request.blocks)
        self.tails.leave(request)
        self._blocks.close_row(request)

    def compose(
        self,
        step: int,
        in_flight_step: int,
        victims: Sequence[Victim],
        admitted: Sequence[Admission],
        substitutes: Sequence[Admission],
        ran: Iterable[LiveRequest],
        now_us: int,
        anyway: bool = False,
    ) -> Batch | None:
        """The batch of this step, or None if there is nothing to tell and it is not wanted `anyway`. `ran` are the rows
        that have more to seal: those of the completed step, and those whose load has ended."""
        seals, self._seals = self._seals, []
        for request in self._filled(ran):
            seals += self._seals_of(request)
        for victim in victims:
            self.preempt(victim, seals)
        self._forget_left(seals)
        sent = Sent(parting_blocks=self._parting_blocks)
        self._parting_blocks = 0
        for admission in admitted:
            self._registry.board(admission.request)
        for admission in substitutes:
            admission.request.state = State.STANDBY
        acquires, reserves = self._board([*admitted, *substitutes], sent, now_us)
        tails = sent.tails = self.tails.compose()
        needed = self._needed_blocks()
        returns = self._excess(needed)
        grant = max(0, needed - len(self._blocks.granted))
        releases, self._releases = self._releases, []
        swaps, self._swaps = self._swaps, []
        binds = [Bind(request_id, taken) for request_id, taken in self._untold.items()]
        self._untold.clear()
        told = (seals, releases, swaps, binds, returns, tails.sharings, tails.forkings, acquires)
        if not (grant or anyway or any(told)):
            return None
        self._sent.append(sent)
        return Batch(
            op_seq=0,
            step=step,
            in_flight_step=in_flight_step,
            seals=seals,
            releases=releases,
            swaps=swaps,
            binds=binds,
            returns=returns,
            shares=tails.shares,
            forks=tails.forks,
            acquires=acquires,
            reserves=reserves,
            grant=grant,
        )

    def _forget_left(self, seals: list[Seal]) -> None:
        """Ended requests are sealed, released and forgotten; while a load is copied into its blocks, one stays."""
        for request in self._left:
            if request.load is None:
                if request.boardings:
                    seals += self._seals_of(request)
                    self._let_go(request)
                self._registry.forget(request)
        self._left = [request for request in self._left if request.load is not None]

    def answered(self, answer: BatchAnswer, now_us: int, step_in_flight: int = 0) -> None:
        """Applies the answer to the oldest unanswered batch. `step_in_flight` 0: none is."""
        sent = self._sent.popleft()
        self.counts, self.lower = answer.counts, answer.lower
        for boarding, acquired, reserved in zip(sent.boarding, answer.acquires, answer.reserves, strict=True):
            request = boarding.request
            if not boarding.current:
                self.copying.refuse(reserved)
                continue
            if acquired.code is not ResultCode.OK or reserved.code is not ResultCode.OK:
                request.note(now_us, f"went back to waiting: {reserved.short_by} blocks short")
                request.known_hits = -1
                self._give_up(request)
                continue
            if request.state is State.BOARDING:
                request.state = State.RUNNING
            self._blocks.mark_new(reserved.blocks)
            self._blocks.extend(request, [*acquired.blocks, *[UNKNOWN_BLOCK] * acquired.joined, *reserved.blocks])
            request.sealed = len(acquired.blocks)
            slot = request.slot
            self._registry.held_blocks[slot] = len(request.blocks)
            self._registry.waits_for[slot] = acquired.owner if acquired.joined else request.host_id
            if reserved.ticket:
                self.copying.expect(request, reserved, step_in_flight)
                request.note(
                    now_us, f"loads {reserved.cpu_blocks} blocks of the CPU tier, {reserved.ssd_blocks} of the SSD"
                )
            else:
                self._registry.loading[slot] = 0
                self._start_at_hit(request, now_us)
        self._blocks.granted += answer.granted
        for event in answer.joins:
            joiner = self._registry.by_id.get(event.request)
            if joiner is None or joiner.state not in (State.RUNNING, State.STANDBY):
                continue
            self._blocks.fill(joiner, event.blocks)
            joiner.sealed += len(event.blocks)
            if event.withdrawn:
                joiner.note(now_us, "the prefix that it waited for was given up")
                self._releases.append(Release(joiner.id))
                self._give_up(joiner)
            elif not joiner.joined:
                self._registry.waits_for[joiner.slot] = joiner.host_id
                self._start_at_hit(joiner, now_us)
        self.tails.answered(sent.tails, answer.shares, answer.forks)

    def load_ended(self, request: LiveRequest, load: Load, now_us: int) -> None:
        """The row goes on behind what was loaded; the next batch seals it."""
        self._registry.loading[request.slot] = 0
        cpu = min(load.good, load.cpu_blocks)
        self._start_at_hit(request, now_us, (cpu, load.good - cpu))

    def _give_up(self, request: LiveRequest) -> None:
        """A request that boarded, stood by or joined goes back to waiting with nothing in hand."""
        self.tails.leave(request)
        self._blocks.close_row(request)
        if request.state is State.STANDBY:
            self._registry.dismiss(request)
        else:
            self._registry.back_to_waiting(request)

    def dismiss(self, request: LiveRequest) -> None:
        """A substitute was not needed: the next batch seals what it has loaded and releases what it had reserved."""
        self._seals += self._seals_of(request)
        self._releases.append(Release(request.id))
        self._give_up(request)

    def blocks_short(self) -> int:
        """Blocks that running rows will need and that are neither granted nor to be had."""
        return self._needed_blocks() - len(self._blocks.granted) - self.counts.free - self.counts.evictable

    def reopened(self, counts: Counts, lower: LowerTiers, now_us: int) -> None:
        """The cache was restarted and has our declaration: what was on the way is void."""
        for sent in self._sent:
            for boarding in sent.boarding:
                if boarding.current:
                    boarding.request.note(now_us, "went back to waiting: the cache was restarted")
                    self._give_up(boarding.request)
        self.tails.reopened([sent.tails for sent in self._sent])
        self._sent.clear()
        self.counts, self.lower = counts, lower
        self.copying.reopened()

    @property
    def storing(self) -> bool:
        """See CacheState."""
        return self.copying.storing

    def declare(self) -> list[DeclaredBlock]:
        """Every device block that is not free, for a restarted cache. Joiners and substitutes go back to waiting."""
        for request in [r for r in self._registry.running if r.joined]:
            self._give_up(request)
        standing_by = [r for r in self._registry.by_id.values() if r.state is State.STANDBY]
        loading = [request for request in standing_by if request.load is not None]
        for request in [request for request in standing_by if request.load is None]:
            self._give_up(request)
        self._releases.clear()
        self._seals.clear()
        self._swaps.clear()
        self._returns.clear()
        self._untold.clear()
        return declaration([*self._registry.running, *self._left, *loading], self._blocks)

    def _filled(self, ran: Iterable[LiveRequest]) -> list[LiveRequest]:
        """Of rows that ran or were loaded, those that go on with a block more full of tokens than is sealed."""
        rows = [request for request in ran if request.state in (State.RUNNING, State.STANDBY)]
        if not rows:
            return rows
        slots, registry = slots_of(rows), self._registry
        length = registry.prompt_tokens[slots] + registry.generated_tokens[slots]
        full = np.minimum(registry.computed_tokens[slots], length) // self._blocks.block_tokens
        sealed = np.array([request.sealed for request in rows], np.int64)
        return [rows[i] for i in np.flatnonzero(full > sealed).tolist()]

    def _seals_of(self, request: LiveRequest) -> list[Seal]:
        """The blocks that have been filled with committed tokens since the last seal, as one run."""
        size = self._blocks.block_tokens
        computed = int(self._registry.computed_tokens[request.slot])
        told = len(request.blocks) - len(self._untold.get(request.id, ()))
        full = min(min(computed, request.length) // size, told)
        first = request.sealed
        if full <= first or request.joined:
            return []
        keys = request.hash_to(full * size, size)
        request.sealed = full
        return [
            Seal(
                request=request.id,
                blocks=request.blocks[first:full],
                keys=keys[first:],
                parent=request.parent_of(first),
                token_ids=request.tokens[first * size : full * size].tobytes(),
                tenant=request.submission.tenant,
                salt_digest=request.salt_digest,
                model_version=request.root.model_version,
            )
        ]

    def _board(self, admitted: Sequence[Admission], sent: Sent, now_us: int) -> tuple[list[Acquire], list[Reserve]]:
        """Acquire and Reserve of each request that gets a row or stands by for one."""
        size = self._blocks.block_tokens
        acquires: list[Acquire] = []
        reserves: list[Reserve] = []
        for admission in admitted:
            request = admission.request
            keys = request.hash_to(request.length, size)
            self._blocks.open_row(request)
            request.boardings += 1
            request.boarded_tokens = request.length
            slot = request.slot
            total = self.tails.board(request)
            self._registry.admitted_us[slot] = now_us
            self._registry.held_blocks[slot] = total
            sent.boarding.append(Boarding(request, request.boardings))
            sent.promised_blocks += max(0, total - max(0, request.known_hits))
            acquires.append(Acquire(request.id, keys))
            reserves.append(Reserve(request.id, keys, total, admission.load_blocks))
        return acquires, reserves

    def _start_at_hit(self, request: LiveRequest, now_us: int, loaded: tuple[int, int] = (0, 0)) -> None:
        """The row starts behind what the cache had, and what was `loaded` of CPU tier and SSD, in blocks: at most one
        token less than it has."""
        if request.joined:
            return
        size = self._blocks.block_tokens
        hit = min(self.tails.known(request, request.sealed + sum(loaded)), request.length - 1)
        self._registry.computed_tokens[request.slot] = hit
        again = request.cached_tokens >= 0
        if not request.first_row_us:  # until it runs, none of it was computed for it
            request.cached_tokens = cached = min(hit, request.prompt_tokens - 1)
            ssd = min(loaded[1] * size, cached)
            request.lower_tokens = (min(loaded[0] * size, cached - ssd), ssd)
        what = f"boarded again, {hit} of its {request.length} tokens were cached"
        request.note(now_us, what if again else f"boarded with {request.cached_tokens} cached tokens")

    def next_blocks(self) -> int:
        """Granted blocks that running rows need for one token behind what is in flight."""
        slots = self._registry.running_slots()
        start, length = self._registry.planned(slots)
        room = self._registry.held_blocks[slots].astype(np.int64) * self._blocks.block_tokens
        return int(((start >= room) & (start < length)).sum())

    def _needed_blocks(self) -> int:
        """Granted blocks that running rows will need within the lookahead."""
        registry = self._registry
        slots = registry.running_slots()
        slots = slots[registry.loading[slots] == 0]
        if len(slots) == 0:
            return 0
        total = registry.prompt_tokens[slots] + registry.max_new_tokens[slots] - 1  # the last one is never written
        reach = registry.computed_tokens[slots] + registry.in_flight_tokens[slots] + GRANT_LOOKAHEAD_TOKENS
        wanted = -(-np.minimum(reach, total) // self._blocks.block_tokens)
        return max(0, int(np.maximum(0, wanted - registry.held_blocks[slots]).sum()) - self.tails.forking)

    def _excess(self, needed: int) -> list[Return]:
        """Grants beyond need go back: a boarding request may be waiting for them."""
        back, self._returns = self._returns + self._blocks.granted[needed:], []
        del self._blocks.granted[needed:]
        return [Return(back)] if back else []
