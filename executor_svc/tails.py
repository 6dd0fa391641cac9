"""Copy-on-write of tails. A *tail* is the partly filled last block of a prompt that several choices answer.

Of the choices of a request the first that boards computes the prompt; it is the *host* of those that board meanwhile.
The full blocks they join by key, as anyone with the same prefix does. The tail has no key, so:

1. A choice that boards while its host computes reserves the full blocks only and waits for the host.
2. Once the last step of the host's prompt has completed, Share makes those that wait holders of its tail. They have the
   whole prompt then, and compute its last token once more as a query, which writes nothing.
3. Before its first write a holder asks Fork. It gets a block of its own, which the next step begins by copying the
   tail to (DeviceBlocks.copies); or, as the last holder, it may write in place.

From 1 on the host and from 2 on each holder computes nothing behind the prompt until its Fork is answered
(DeviceBlocks.guarded); from 2 on the block is closed in the write table (DeviceBlocks.writable). A choice that boards
later, or whose host leaves before 2, computes the tail itself: the same few tokens, in a block of its own.

A holder's column `held_blocks` does not count the closed tail: to the scheduler it is a row that needs one block
before its next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from executor_svc.blocks import DeviceBlocks
from executor_svc.live_request import LiveRequest, State
from executor_svc.registry import Registry
from jitney.block_ops import Block, ChainHits, Fork, ForkResult, RequestId, ResultCode, Share, block_id


def host_of(request: LiveRequest) -> LiveRequest | None:
    """The sibling that has the request's tail for itself and is computing it, or will; None if none does, or if the
    request has more than its prompt."""
    if request.length > request.prompt_tokens:
        return None
    for sibling in request.siblings:
        boarded = sibling.state in (State.BOARDING, State.RUNNING) and sibling.table_row >= 0
        fills = not sibling.heir and sibling.length == sibling.prompt_tokens
        if boarded and fills and sibling is not request:
            return sibling
    return None


def joining(hits: ChainHits, host: RequestId) -> ChainHits:
    """What a look-up would say of a request that waits for its host."""
    return replace(hits, pending_blocks=max(1, hits.pending_blocks), pending_owner=host)


@dataclass(frozen=True, slots=True)
class Holder:
    """A row and which of its boardings is meant."""

    request: LiveRequest
    boardings: int

    @property
    def current(self) -> bool:
        """Whether the row still runs in that boarding."""
        return self.request.state is State.RUNNING and self.request.boardings == self.boardings


@dataclass(frozen=True, slots=True)
class Sharing:
    """A Share on its way: `heirs` become holders of the host's tail."""

    host: Holder
    block: Block
    heirs: Sequence[Holder]


@dataclass(frozen=True, slots=True)
class Forking:
    """A Fork on its way."""

    holder: Holder
    block: Block


@dataclass(frozen=True, slots=True)
class TailOps:
    """What a batch asks for tails."""

    sharings: Sequence[Sharing] = ()
    forkings: Sequence[Forking] = ()

    @property
    def shares(self) -> list[Share]:
        """As the batch says it."""
        return [Share(sharing.block, [heir.request.id for heir in sharing.heirs]) for sharing in self.sharings]

    @property
    def forks(self) -> list[Fork]:
        """As the batch says it."""
        return [Fork(forking.holder.request.id, forking.block) for forking in self.forkings]


NOTHING = TailOps()


class Tails:
    """Who waits for whose tail, and who holds one that is closed. Rows without siblings pass through untouched."""

    def __init__(self, registry: Registry, blocks: DeviceBlocks) -> None:
        self._registry = registry
        self._blocks = blocks
        self._heirs: dict[RequestId, list[LiveRequest]] = {}  # by the host that they wait for
        self._closed: dict[RequestId, tuple[LiveRequest, Block]] = {}
        self._asked: set[RequestId] = set()  # of the closed ones, those whose Fork is on its way

    @property
    def forking(self) -> int:
        """Rows whose own block is on its way: they need no granted one."""
        return len(self._asked)

    def board(self, request: LiveRequest) -> int:
        """How many blocks of its prompt a request that boards has to have for itself; finds it a host."""
        size = self._blocks.block_tokens
        total = -(-request.length // size)
        if request.state is not State.BOARDING or not request.prompt_tokens % size:
            return total
        host = host_of(request)
        if host is None:
            return total
        request.host, request.heir = host, True
        self._blocks.guarded.add(host.id)
        self._heirs.setdefault(host.id, []).append(request)
        return total - 1

    def known(self, request: LiveRequest, blocks: int) -> int:
        """Leading tokens whose KV the request has, if it has so many blocks in full."""
        size = self._blocks.block_tokens
        if request.id in self._closed and blocks >= request.prompt_tokens // size:
            return request.prompt_tokens
        return blocks * size

    def compose(self) -> TailOps:
        """What the next batch asks."""
        if not self._heirs and not self._closed:
            return NOTHING
        sharings = [self._share(heirs[0].host) for heirs in list(self._heirs.values()) if heirs[0].host]
        forkings = []
        for request, block in self._closed.values():
            slot = request.slot
            if request.id in self._asked or request.state is not State.RUNNING:
                continue
            in_flight = int(self._registry.in_flight_tokens[slot])
            writes = request.generated + (in_flight > 0) < self._registry.max_new_tokens[slot]
            if writes and self._registry.computed_tokens[slot] + in_flight >= request.prompt_tokens:
                self._asked.add(request.id)
                forkings.append(Forking(Holder(request, request.boardings), block))
        return TailOps([sharing for sharing in sharings if sharing is not None], forkings)

    def _share(self, host: LiveRequest) -> Sharing | None:
        """The tail of a host that is ready. Heirs whose boarding is not answered yet wait no longer."""
        if host.state is not State.RUNNING or self._registry.computed_tokens[host.slot] < host.prompt_tokens:
            return None
        heirs = self._heirs.pop(host.id)
        ready = [Holder(heir, heir.boardings) for heir in heirs if heir.state is State.RUNNING]
        for heir in heirs:
            if heir.state is not State.RUNNING:
                self._part(heir)
        if not ready:
            self._unguard(host)
            return None
        block = host.blocks[host.prompt_tokens // self._blocks.block_tokens]
        if host.id not in self._closed:
            self._close(host, block)
        return Sharing(Holder(host, host.boardings), block, ready)

    def answered(self, asked: TailOps, shared: Sequence[ResultCode], forked: Sequence[ForkResult]) -> None:
        """Applies the answers to what `compose` asked. Joins of the same answer have been applied."""
        for sharing, code in zip(asked.sharings, shared, strict=True):
            for heir in sharing.heirs:
                if not heir.current or heir.request.host is not sharing.host.request:
                    continue
                if code is ResultCode.OK:
                    self._inherit(heir.request, sharing.block)
                else:
                    self._part(heir.request)
        for forking, result in zip(asked.forkings, forked, strict=True):
            request = forking.holder.request
            if not forking.holder.current or request.id not in self._closed:
                continue
            self._asked.discard(request.id)
            if result.code is ResultCode.OK:
                self._blocks.fork(request, forking.block, result.block)
                self._open(request)
            elif result.code is ResultCode.IN_PLACE and self._holders(forking.block) == 1:
                self._open(request)

    def _inherit(self, heir: LiveRequest, block: Block) -> None:
        """The heir has the whole prompt, as soon as it has what it joined or loads."""
        heir.host = None
        self._blocks.extend(heir, [block])
        self._close(heir, block)
        if heir.joined:
            return
        registry, slot = self._registry, heir.slot
        registry.waits_for[slot] = 0
        if heir.load is not None:
            return
        registry.computed_tokens[slot] = has = min(self.known(heir, heir.sealed), heir.prompt_tokens - 1)
        if not heir.first_row_us:
            heir.cached_tokens = has

    def _close(self, request: LiveRequest, block: Block) -> None:
        self._blocks.guarded.add(request.id)
        self._closed[request.id] = (request, block)
        self._blocks.writable[block_id(block)] = False
        self._registry.held_blocks[request.slot] = len(request.blocks) - 1

    def _open(self, request: LiveRequest) -> None:
        """The row may write behind its prompt."""
        _, block = self._closed.pop(request.id)
        self._unguard(request)
        self._registry.held_blocks[request.slot] = len(request.blocks)
        self._opened(block)

    def _unguard(self, request: LiveRequest) -> None:
        if request.id not in self._closed and request.id not in self._heirs:
            self._blocks.guarded.discard(request.id)

    def _opened(self, block: Block) -> None:
        if not self._holders(block):
            self._blocks.writable[block_id(block)] = True

    def _holders(self, block: Block) -> int:
        return sum(held == block for _, held in self._closed.values())

    def _part(self, heir: LiveRequest) -> None:
        """Its host is of no use to it any more: it goes on by itself."""
        heir.host, heir.heir = None, False
        if heir.state is State.RUNNING and not heir.joined:
            self._registry.waits_for[heir.slot] = 0

    def leave(self, request: LiveRequest) -> None:
        """The row has ended, or lets go of all that it has."""
        if not request.siblings:
            return
        for heir in self._heirs.pop(request.id, ()):
            self._part(heir)
        host, request.host, request.heir = request.host, None, False
        if host is not None and (heirs := self._heirs.get(host.id)) and request in heirs:
            heirs.remove(request)
            if not heirs:
                del self._heirs[host.id]
                self._unguard(host)
        self._asked.discard(request.id)
        _, block = self._closed.pop(request.id, (None, None))
        self._unguard(request)
        if block is not None:
            self._opened(block)

    def reopened(self, void: Sequence[TailOps]) -> None:
        """The cache was restarted: what was asked is void, and asked again."""
        self._asked.clear()
        for sharing in (sharing for asked in void for sharing in asked.sharings):
            heirs = [h.request for h in sharing.heirs if h.current and h.request.host is sharing.host.request]
            if heirs and sharing.host.current:
                self._heirs[sharing.host.request.id] = heirs
            else:
                for heir in heirs:
                    self._part(heir)
