"""The ledger's rules once more, as plainly as they can be said: no index, no counters, everything found by looking.

`NaiveLedger.follow(batch, answer)` checks an answer of the real ledger and moves along. Which free blocks the ledger
takes is its own choice; all else is foretold, the order of evictions included. Which blocks copies pin is told from
outside, `pin` and `set_pins`; a batch with a swap, or for a request that was swapped, takes blocks for nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jitney.block_ops import (
    Acquire,
    AcquireResult,
    Batch,
    BatchAnswer,
    Block,
    BlockState,
    Chain,
    ChainHits,
    Counts,
    DeclaredBlock,
    JoinEvent,
    RequestId,
    Reserve,
    ResultCode,
    Seal,
    block_id,
)
from jitney.block_ops import handle as handle_of
from jitney.keys import Key

FREE, GRANTED, WRITING = BlockState.FREE, BlockState.GRANTED, BlockState.WRITING
SEALED, CACHED = BlockState.SEALED, BlockState.CACHED
OK, STALE, NOT_HELD = ResultCode.OK, ResultCode.STALE, ResultCode.NOT_HELD


@dataclass
class NaiveBlock:
    """One block."""

    id: int
    generation: int = 1
    state: BlockState = FREE
    holders: dict[RequestId, int] = field(default_factory=dict)  # with the moment from which on
    key: Key | None = None  # sealed under
    parent: Key | None = None
    token_ids: bytes = b""
    name: Key | None = None  # reserved for
    owns: bool = False  # its holder computes `name` for all
    pins: int = 0

    @property
    def handle(self) -> Block:
        """Its handle now."""
        return handle_of(self.id, self.generation)


class NaiveLedger:
    """Blocks, joins (request -> keys, in the order of the chain) and the order in which blocks became evictable."""

    def __init__(self, total: int, *, foretells: bool = True) -> None:
        """Without `foretells` it does not know which blocks go first, only that leaves do."""
        self.foretells = foretells
        self.blocks = [NaiveBlock(number) for number in range(total)]
        self.joins: dict[RequestId, list[Key]] = {}
        self.order: list[int] = []
        self.events: dict[RequestId, tuple[list[Block], int]] = {}
        self.private: set[RequestId] = set()
        self.moment = 0

    # What can be seen.

    def sealed(self, key: Key | None) -> NaiveBlock | None:
        """The block that is found under the key."""
        return next((b for b in self.blocks if b.key is not None and b.key == key), None)

    def owner(self, key: Key) -> RequestId:
        """Who computes the key; 0: nobody."""
        return next((next(iter(b.holders)) for b in self.blocks if b.owns and b.name == key), RequestId(0))

    def held(self, request: RequestId) -> list[NaiveBlock]:
        """Blocks that the request holds."""
        return [b for b in self.blocks if request in b.holders]

    def knows(self, request: RequestId) -> bool:
        """Whether the request has anything."""
        return bool(self.held(request) or self.joins.get(request))

    def named(self, request: RequestId) -> list[Key]:
        """Keys that the request reserved blocks for and has not sealed."""
        return [b.name for b in self.held(request) if b.name is not None]

    def evictable(self) -> set[int]:
        """Cached blocks behind which nothing is held."""
        ready: set[int] = set()
        while True:
            more = {
                b.id
                for b in self.blocks
                if b.state is CACHED
                and b.id not in ready
                and all(c.id in ready for c in self.blocks if c.key is not None and c.parent == b.key)
            }
            if not more:
                return ready
            ready |= more

    def counts(self) -> Counts:
        """As the ledger should count."""
        free = sum(b.state is FREE for b in self.blocks)
        granted = sum(b.state is GRANTED for b in self.blocks)
        return Counts(free, len(self.evictable()), len(self.leaving()), granted, len(self.blocks))

    def leaving(self) -> set[int]:
        """Blocks that nobody holds and that copies keep from being had, or from being evicted."""
        pinned = [b for b in self.blocks if b.pins and not b.holders]
        before = {b.id for b in self.blocks if b.state is CACHED and any(self._stands_before(b, p) for p in pinned)}
        return {b.id for b in pinned} | (before - self.evictable())

    def _stands_before(self, b: NaiveBlock, other: NaiveBlock) -> bool:
        parent = self.sealed(other.parent) if other.key is not None else None
        return parent is not None and (parent is b or (parent.state is CACHED and self._stands_before(b, parent)))

    def chain_of(self, request: RequestId) -> list[Key]:
        """Sealed keys that the request holds, and those before them, from the start on."""
        keys: dict[Key, int] = {}
        for b in self.held(request):
            at: NaiveBlock | None = b
            while at is not None and at.key is not None:
                keys[at.key] = self._depth(at)
                at = self.sealed(at.parent)
        return sorted(keys, key=lambda key: keys[key])

    def hits(self, chain: Chain) -> ChainHits:
        """As a look-up should say."""
        found = self._found(chain.keys)
        pending = self._pending(chain.keys[len(found) :], chain.request)
        unheld = sum(b.id in self.evictable() for b in found)
        owner = self.owner(pending[0]) if pending else RequestId(0)
        return ChainHits(len(found), unheld, 0, 0, len(pending), owner)

    def declare(self) -> list[DeclaredBlock]:
        """What an executor would tell a restarted cache."""
        declared = []
        for b in self.blocks:
            key, parent = (b.key, b.parent) if b.state is SEALED else (b.name if b.owns else None, None)
            if b.state in (GRANTED, WRITING, SEALED):
                joiners = [r for r, keys in self.joins.items() if b.owns and b.name in keys]
                declared.append(
                    DeclaredBlock(
                        b.handle,
                        b.state,
                        key or b"",
                        parent or (b"p" * 32 if key else b""),
                        b.token_ids,
                        holders=sorted(b.holders),
                        joiners=joiners,
                    )
                )
        return declared

    def restarted(self) -> None:
        """What is left when the cache was restarted and told `declare()`."""
        newest = max((b.generation for b in self.blocks if b.state in (GRANTED, WRITING, SEALED)), default=0)
        for b in self.blocks:
            if b.state in (FREE, CACHED):
                self.blocks[b.id] = NaiveBlock(b.id, newest + 1)
            elif not b.owns:
                b.name = None
        for state in (SEALED, WRITING):
            for b in self.blocks:
                if b.state is state:
                    b.holders = {request: self._now() for request in b.holders}
        self.order, self.events = [], {}
        self._reorder()

    # What happens besides batches.

    def pin(self, ids: Iterable[int]) -> None:
        """Copies need these blocks."""
        for number in ids:
            b = self.blocks[number]
            b.pins += 1
            if b.state is CACHED:
                b.state = SEALED
        self._reorder()

    def set_pins(self, pins: Sequence[int]) -> None:
        """Copies that needed blocks have ended: these are the pins that are left."""
        for b, left in zip(self.blocks, pins, strict=True):
            assert left <= b.pins, f"block {b.id} is pinned by nothing that was told"
            if b.pins and not left and not b.holders:
                b.pins = 0
                if b.state is SEALED:
                    b.state = CACHED
                else:
                    self._free(b)
            self.blocks[b.id].pins = left
        self._reorder()

    def forget(self, doomed: set[Key]) -> None:
        """What is held of it is private, and so is what its holders compute from here on."""
        for request in {r for b in self.blocks for r in b.holders}:
            if ({b.key for b in self.held(request)} | set(self.named(request))) & doomed:
                self.private.add(request)
        for request in self.private:
            self._unname(self.held(request))
        for b in self.blocks:
            if b.key in doomed:
                b.key = b.parent = None
                b.state = WRITING
                if not b.holders and not b.pins:
                    self._free(b)
        self._reorder()

    # One batch.

    def follow(self, batch: Batch, answer: BatchAnswer, *, check_counts: bool = True) -> None:
        """Asserts that this is the right answer. Without `check_counts`, pins have changed in ways not told yet."""
        short: set[RequestId] = set()
        assert answer.op_seq == batch.op_seq
        self._forget_private()
        assert [list(c) for c in answer.seals] == [self._seal(op) for op in batch.seals]
        assert list(answer.withdraws) == [self._withdraw(op.request) for op in batch.withdraws]
        assert [list(c) for c in answer.releases] == [self._release(op.request, op.blocks) for op in batch.releases]
        assert [list(c) for c in answer.binds] == [[self._bind(op.request, h) for h in op.blocks] for op in batch.binds]
        assert [list(c) for c in answer.returns] == [[self._return(h) for h in op.blocks] for op in batch.returns]
        assert list(answer.shares) == [self._share(op.block, op.requests) for op in batch.shares]
        for swap, swapped in zip(batch.swaps, answer.swaps, strict=True):
            assert swapped.code is self._release_all(swap.request)
        self._forget_private()
        for fork, forked in zip(batch.forks, answer.forks, strict=True):
            self._fork(fork.request, fork.block, forked.code, forked.block)
        waiting = {op.request: op for op in batch.acquires}
        expected = {op.request: self._acquire(op, short) for op in batch.acquires}
        for reserve, result in zip(batch.reserves, answer.reserves, strict=True):
            acquire = waiting.pop(reserve.request, None)
            code, need = self._reserve(reserve, acquire, short, waiting)
            assert result.code is code
            if code is OK:
                self._take(result.blocks, need)
                self._name(reserve, result.blocks)
                if acquire is not None:
                    expected[reserve.request] = self._acquired(acquire)
            else:
                assert result.short_by == need and not result.blocks
                if code is ResultCode.SHORT:
                    expected[reserve.request] = AcquireResult(OK)
                    short.add(reserve.request)
        for acquire in waiting.values():
            if acquire.request not in short:
                expected[acquire.request] = self._acquired(acquire)
        for acquire, acquired in zip(batch.acquires, answer.acquires, strict=True):
            wanted = expected[acquire.request]
            assert replace(acquired, blocks=list(acquired.blocks)) == replace(wanted, blocks=list(wanted.blocks))
        available = sum(b.state is FREE for b in self.blocks) + len(self.evictable())
        self._take(answer.granted, min(batch.grant, available))
        for h in answer.granted:
            self._block(h).state = GRANTED
        assert sorted(answer.joins, key=lambda e: e.request) == sorted(self._told(), key=lambda e: e.request)
        if check_counts:
            assert answer.counts == self.counts()

    # Its operations.

    def _seal(self, op: Seal) -> list[ResultCode]:
        codes, parent, size = [], op.parent, len(op.token_ids) // max(1, len(op.blocks))
        for at, (h, key) in enumerate(zip(op.blocks, op.keys, strict=True)):
            codes.append(self._seal_one(op.request, h, key, parent, op.token_ids[at * size : (at + 1) * size]))
            self._reorder()
            parent = key
        return codes

    def _seal_one(self, request: RequestId, h: Block, key: Key, parent: Key, token_ids: bytes) -> ResultCode:
        b = self._block(h)
        if b.handle != h:
            return STALE
        if request not in b.holders:
            return NOT_HELD
        if b.state is not WRITING or len(b.holders) > 1:
            return OK if b.key == key else NOT_HELD
        if b.name != key:
            self._unname([b])
        if self.sealed(key) or request in self.private:
            return ResultCode.DUPLICATE
        b.state, b.key, b.parent, b.token_ids, b.name, b.owns = SEALED, key, parent, token_ids, None, False
        for other in self.blocks:
            if other.name == key:
                other.owns = False
        for joiner, keys in list(self.joins.items()):
            if key in keys:
                keys.remove(key)
                b.holders.setdefault(joiner, self._now())
                self.events.setdefault(joiner, ([], 0))[0].append(h)
        return OK

    def _withdraw(self, request: RequestId) -> ResultCode:
        if not self.knows(request):
            return NOT_HELD
        self._unname(self.held(request))
        return OK

    def _unname(self, blocks: Iterable[NaiveBlock]) -> None:
        gone = {b.name for b in blocks if b.owns}
        for b in blocks:
            b.name, b.owns = None, False
        for joiner, keys in list(self.joins.items()):
            if gone & set(keys):
                told = self.events.setdefault(joiner, ([], 0))
                self.events[joiner] = (told[0], told[1] + len(keys))
                del self.joins[joiner]

    def _release(self, request: RequestId, handles: Sequence[Block]) -> list[ResultCode]:
        if not handles:
            return [self._release_all(request)]
        codes = []
        for h in handles:
            b = self._block(h)
            if b.handle != h:
                codes.append(STALE)
            elif request not in b.holders:
                codes.append(NOT_HELD)
            else:
                self._drop(b, request)
                codes.append(OK)
        return codes

    def _release_all(self, request: RequestId) -> ResultCode:
        known = self.knows(request)
        self.private.discard(request)
        self.joins.pop(request, None)
        self._unname(self.held(request))
        for b in sorted(self.held(request), key=lambda b: -b.holders[request]):
            self._drop(b, request)
        self.events.pop(request, None)
        return OK if known else NOT_HELD

    def _drop(self, b: NaiveBlock, request: RequestId) -> None:
        if b.name is not None:
            self._unname([b])
        del b.holders[request]
        if not b.holders and not b.pins:
            if b.state is SEALED:
                b.state = CACHED
            else:
                self._free(b)
        self._reorder()

    def _bind(self, request: RequestId, h: Block) -> ResultCode:
        b = self._block(h)
        if b.handle != h:
            return STALE
        if b.state is not GRANTED:
            return NOT_HELD
        b.state, b.holders = WRITING, {request: self._now()}
        return OK

    def _return(self, h: Block) -> ResultCode:
        b = self._block(h)
        if b.handle != h:
            return STALE
        if b.state is not GRANTED:
            return NOT_HELD
        self._free(b)
        return OK

    def _share(self, h: Block, requests: Sequence[RequestId]) -> ResultCode:
        b = self._block(h)
        if b.handle != h:
            return STALE
        if b.state is not WRITING or b.name is not None:
            return NOT_HELD
        for request in requests:
            b.holders.setdefault(request, self._now())
        return OK

    def _fork(self, request: RequestId, h: Block, code: ResultCode, new: Block) -> None:
        b = self._block(h)
        room = sum(x.state is FREE for x in self.blocks) + len(self.evictable())
        if b.handle != h:
            assert code is STALE
        elif request not in b.holders:
            assert code is NOT_HELD
        elif b.state is WRITING and len(b.holders) == 1:
            assert code is ResultCode.IN_PLACE
        elif not room:
            assert code is ResultCode.SHORT
        else:
            assert code is OK
            self._take([new], 1)
            copy = self._block(new)
            copy.state, copy.holders = WRITING, {request: self._now()}
            self._drop(b, request)

    def _acquire(self, op: Acquire, short: set[RequestId]) -> AcquireResult:
        found = self._found(op.keys)
        mine = self.named(op.request)
        found = found[: next((at for at, key in enumerate(op.keys) if key in mine), len(found))]
        if len(found) < op.least_blocks:
            self._release_all(op.request)
            short.add(op.request)
            return AcquireResult(ResultCode.LOST)
        for b in found:
            b.holders.setdefault(op.request, self._now())
            b.state = SEALED
        self._reorder()
        self._join(op)
        self.events.pop(op.request, None)
        return self._acquired(op)

    def _join(self, op: Acquire) -> None:
        covered = 0
        for key in op.keys:
            b = self.sealed(key)
            if b is None or op.request not in b.holders or key in self.named(op.request):
                break
            covered += 1
        joined = self._pending(op.keys[covered:], op.request)
        keys = self.joins.setdefault(op.request, [])
        keys += [key for key in joined if key not in keys]
        if not keys:
            del self.joins[op.request]

    def _acquired(self, op: Acquire) -> AcquireResult:
        blocks = []
        for key in op.keys:
            b = self.sealed(key)
            if b is None or op.request not in b.holders or key in self.named(op.request):
                break
            blocks.append(b.handle)
        joins = self.joins.get(op.request, [])
        behind = op.keys[len(blocks) : len(blocks) + 1]
        owner = self.owner(behind[0]) if behind and behind[0] in joins else RequestId(0)
        return AcquireResult(OK, blocks, len(joins), owner)

    def _reserve(
        self, op: Reserve, acquire: Acquire | None, short: set[RequestId], waiting: dict[RequestId, Acquire]
    ) -> tuple[ResultCode, int]:
        if op.request in short:
            return ResultCode.SKIPPED, 0
        if acquire is not None:
            self._join(acquire)
        need = max(0, op.blocks_total - len(self.held(op.request)) - len(self.joins.get(op.request, ())))
        room = sum(b.state is FREE for b in self.blocks) + len(self.evictable())
        if need > room:
            self._release_all(op.request)
            for later in waiting:  # told by the result of their Acquire
                self.events.pop(later, None)
            return ResultCode.SHORT, need - room
        return OK, need

    def _name(self, op: Reserve, new: Sequence[Block]) -> None:
        mine = {b.key for b in self.held(op.request)} | set(self.named(op.request))
        mine |= set(self.joins.get(op.request, ()))
        for h in new:
            b = self._block(h)
            b.state, b.holders = WRITING, {op.request: self._now()}
        keys = [key for key in op.keys if key not in mine] if op.request not in self.private else []
        for key, h in zip(keys, new, strict=False):
            b = self._block(h)
            b.name = key
            b.owns = self.sealed(key) is None and not self.owner(key)

    # Helpers.

    def _now(self) -> int:
        self.moment += 1
        return self.moment

    def _block(self, h: Block) -> NaiveBlock:
        return self.blocks[block_id(h)]

    def _free(self, b: NaiveBlock) -> None:
        self.blocks[b.id] = NaiveBlock(b.id, b.generation + 1)

    def _forget_private(self) -> None:
        """Whoever has nothing any more begins anew."""
        self.private &= {r for b in self.blocks for r in b.holders} | set(self.joins)

    def _depth(self, b: NaiveBlock) -> int:
        parent = self.sealed(b.parent) if b.key is not None else None
        return 0 if parent is None else 1 + self._depth(parent)

    def _found(self, keys: Sequence[Key]) -> list[NaiveBlock]:
        found = []
        for key in keys:
            b = self.sealed(key)
            if b is None:
                break
            found.append(b)
        return found

    def _pending(self, keys: Sequence[Key], request: RequestId) -> list[Key]:
        pending = []
        for key in keys:
            if self.owner(key) in (0, request):
                break
            pending.append(key)
        return pending

    def _reorder(self) -> None:
        """Blocks that became evictable go to the end, children before parents; others leave."""
        evictable = self.evictable()
        self.order = [number for number in self.order if number in evictable]
        new = [self.blocks[number] for number in evictable - set(self.order)]
        self.order += [b.id for b in sorted(new, key=lambda b: (-self._depth(b), b.id))]

    def _take(self, handles: Sequence[Block], wanted: int) -> None:
        """These blocks were taken: all that were free before any was evicted, and of those the first ones."""
        assert len(handles) == wanted == len(set(handles))
        free = {b.id for b in self.blocks if b.state is FREE}
        evicted = {block_id(h) for h in handles} - free
        if self.foretells:
            assert evicted == set(self.order[: max(0, wanted - len(free))])
        else:
            assert evicted <= set(self.order) and len(evicted) == max(0, wanted - len(free))
            gone = {self.blocks[number].key for number in evicted}
            assert all(b.id in evicted for b in self.blocks if b.key is not None and b.parent in gone)
        for number in sorted(evicted):
            self._free(self.blocks[number])
        self.order = [number for number in self.order if number not in evicted]
        for h in handles:
            assert self._block(h).handle == h

    def _told(self) -> list[JoinEvent]:
        told = [JoinEvent(request, blocks, count) for request, (blocks, count) in self.events.items()]
        self.events = {}
        return told
