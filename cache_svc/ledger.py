"""THE state machine of the cache: one Ledger per opened executor, moved by `Ledger.apply` and by nothing else.

It owns which request holds what (`requests`), who computes which key (`pending`), and the block table (`blocks`). No
clock, no random source, no wire: the same batches give the same answers anywhere.

**The algorithm of `apply`.** A batch is checked first; a malformed one is refused whole and changes nothing. Then its
operations run kind by kind, so that what is given back comes before what is taken, and hits are held before anything
is evicted:

1. Seal: the block becomes findable. The first seal of a key wins, a later one leaves its block private. Whoever had
   joined the key holds the block from here on.
2. Withdraw, Release: pending keys of the request lose their owner and their joiners are told; blocks without a holder
   become CACHED if they are sealed, else FREE.
3. Bind, Return, Share, Fork: the blocks of decoding, and copy-on-write.
4. Acquire, for all: hold every sealed block from the start of the chain on, join the pending keys behind them.
5. Reserve, one after the other: join what Reserves before it made pending, then bind blocks for the rest; its keys are
   pending and the request's. One that falls short lets go of all that the request has.
6. Grant: blocks for decoding, as many as there are.

A join ends as a whole: when one of its keys is withdrawn, the joiner is told how many it waited for in all, and joins
or reserves anew. An AcquireResult says all that the request holds of the chain and has joined; what was to be told of
its joins before is folded into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache_svc.blocks import GRANTED, ID_MASK, WRITING, BlockTable
from cache_svc.checks import check
from cache_svc.holding import Holding, Joins
from cache_svc.index import Content, Origin
from cache_svc.pending import Pending
from jitney.block_ops import (
    Acquire,
    AcquireResult,
    Batch,
    BatchAnswer,
    Bind,
    Block,
    Chain,
    ChainHits,
    Fork,
    ForkResult,
    Release,
    RequestId,
    Reserve,
    ReserveResult,
    ResultCode,
    Return,
    Seal,
    Share,
    Swap,
    SwapResult,
)
from jitney.keys import Key

OK = ResultCode.OK
STALE = ResultCode.STALE
NOT_HELD = ResultCode.NOT_HELD
SKIPPED = ResultCode.SKIPPED
NOBODY = RequestId(0)


@dataclass(slots=True)
class Boarding:
    """An Acquire whose result may still change: until the Reserve of its request, or to the end of the batch."""

    request: RequestId
    keys: Sequence[Key]
    code: ResultCode = OK
    found: Sequence[int] = ()
    joined: int = 0
    owner: RequestId = NOBODY


class Ledger:
    """Device blocks of one executor."""

    def __init__(self, blocks: BlockTable, block_tokens: int) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.requests: dict[RequestId, Holding] = {}
        self.pending = Pending()
        self.joins = Joins()
        self.hit_blocks = 0
        self.missed_blocks = 0
        self._boarding: dict[RequestId, Boarding] = {}
        self._fell: set[RequestId] = set()

    def apply(self, batch: Batch) -> BatchAnswer:
        """Runs one batch. Raises InvalidRequest, with nothing changed, if it is malformed."""
        check(batch, self.blocks.total, self.block_tokens)
        seals = [self._seal(op) for op in batch.seals]
        withdraws = [self._withdraw(op.request) for op in batch.withdraws]
        releases = [self._release(op) for op in batch.releases]
        swaps = [self._swap(op) for op in batch.swaps]
        binds = [self._bind(op) for op in batch.binds]
        returns = [self._return(op) for op in batch.returns]
        shares = [self._share(op) for op in batch.shares]
        forks = [self._fork(op) for op in batch.forks]
        boarding = [self._acquire(op) for op in batch.acquires]
        reserves = [self._reserve(op) for op in batch.reserves]
        granted = self._handles(self.blocks.grant(batch.grant))
        acquires = [self._acquired(board) for board in boarding]
        self._boarding.clear()
        self._fell.clear()
        return BatchAnswer(
            op_seq=batch.op_seq,
            counts=self.blocks.counts(),
            seals=seals,
            withdraws=withdraws,
            releases=releases,
            swaps=swaps,
            binds=binds,
            returns=returns,
            shares=shares,
            forks=forks,
            acquires=acquires,
            reserves=reserves,
            granted=granted,
            joins=self.joins.take(),
        )

    def lookup(self, chain: Chain) -> ChainHits:
        """How much of the chain there is. No side effects."""
        found = self.blocks.index.find(chain.keys)
        behind = self.pending.run(chain.keys[len(found) :], chain.request)
        evictable = self.blocks.eviction.order
        return ChainHits(
            device_blocks=len(found),
            unheld_blocks=sum(block in evictable for block in found),
            pending_blocks=len(behind),
            pending_owner=self.pending.owner[behind[0]] if behind else NOBODY,
        )

    def _seal(self, op: Seal) -> list[ResultCode]:
        origin = Origin(op.tenant, op.salt_digest, op.model_version)
        size = 4 * self.block_tokens
        codes: list[ResultCode] = []
        parent = op.parent
        for at, (handle, key) in enumerate(zip(op.blocks, op.keys, strict=True)):
            codes.append(self._seal_one(op, at, handle, key, parent, origin, size))
            parent = key
        return codes

    def _seal_one(
        self, op: Seal, at: int, handle: Block, key: Key, parent: Key, origin: Origin, size: int
    ) -> ResultCode:
        blocks, block = self.blocks, handle & ID_MASK
        if blocks.handle[block] != handle:
            return STALE
        holding = self.requests.get(op.request)
        if holding is None or block not in holding.blocks:
            return NOT_HELD
        if blocks.state[block] is not WRITING or blocks.holders[block] > 1:
            return OK if blocks.index.key[block] == key else NOT_HELD  # a repeat; or nobody may write it
        name = blocks.name[block]
        if name is not None and name != key:
            self._withdraw_keys(op.request, holding, [name])
        if key in blocks.index.sealed:
            return ResultCode.DUPLICATE
        blocks.seal(block, key, parent, Content(op.token_ids[at * size : (at + 1) * size], origin))
        if name == key:
            del holding.own[key]
        for joiner in self.pending.settle(key):
            waiting = self.requests[joiner]
            del waiting.joins[key]
            if block not in waiting.blocks:
                waiting.blocks[block] = None
                blocks.hold((block,))
            self.hit_blocks += 1
            self.joins.sealed(joiner, handle)
        return OK

    def _withdraw(self, request: RequestId) -> ResultCode:
        holding = self.requests.get(request)
        if holding is None:
            return NOT_HELD
        self._withdraw_keys(request, holding, list(holding.own))
        return OK

    def _withdraw_keys(self, request: RequestId, holding: Holding, keys: Sequence[Key]) -> None:
        """The request will not compute these keys of its own; the joins that wait for one of them end."""
        pending = self.pending
        ended: dict[RequestId, int] = {}
        for key in keys:
            self.blocks.name[holding.own.pop(key)] = None
            if pending.owner.get(key) == request:
                for joiner in pending.settle(key):
                    del self.requests[joiner].joins[key]
                    ended[joiner] = ended.get(joiner, 0) + 1
        for joiner, count in ended.items():
            rest = self.requests[joiner].joins
            pending.leave(rest, joiner)
            count += len(rest)
            rest.clear()
            boarding = self._boarding.get(joiner)
            if boarding is not None:
                boarding.joined, boarding.owner = 0, NOBODY
            else:
                self.joins.withdrawn(joiner, count)
                self._tidy(joiner)

    def _release(self, op: Release) -> list[ResultCode]:
        if not op.blocks:
            return [self._release_all(op.request)]
        holding = self.requests.get(op.request)
        codes: list[ResultCode] = []
        for handle in op.blocks:
            block = handle & ID_MASK
            if self.blocks.handle[block] != handle:
                codes.append(STALE)
            elif holding is None or block not in holding.blocks:
                codes.append(NOT_HELD)
            else:
                name = self.blocks.name[block]
                if name is not None:
                    self._withdraw_keys(op.request, holding, [name])
                del holding.blocks[block]
                self.blocks.drop((block,))
                codes.append(OK)
        self._tidy(op.request)
        return codes

    def _release_all(self, request: RequestId) -> ResultCode:
        self.joins.forget(request)
        holding = self.requests.get(request)
        if holding is None:
            return NOT_HELD
        if holding.own:
            self._withdraw_keys(request, holding, list(holding.own))
        if holding.joins:
            self.pending.leave(holding.joins, request)
        self.blocks.drop(reversed(holding.blocks))
        del self.requests[request]
        return OK

    def _swap(self, op: Swap) -> SwapResult:
        """There is no tier below yet: what was sealed is cached here."""
        return SwapResult(self._release_all(op.request))

    def _bind(self, op: Bind) -> list[ResultCode]:
        codes: list[ResultCode] = []
        for handle in op.blocks:
            code = self._granted(handle)
            if code is OK:
                block = handle & ID_MASK
                self.blocks.bind(block)
                self._holding(op.request).blocks[block] = None
            codes.append(code)
        return codes

    def _return(self, op: Return) -> list[ResultCode]:
        codes: list[ResultCode] = []
        for handle in op.blocks:
            code = self._granted(handle)
            if code is OK:
                self.blocks.give_back(handle & ID_MASK)
            codes.append(code)
        return codes

    def _granted(self, handle: Block) -> ResultCode:
        block = handle & ID_MASK
        if self.blocks.handle[block] != handle:
            return STALE
        return OK if self.blocks.state[block] is GRANTED else NOT_HELD

    def _share(self, op: Share) -> ResultCode:
        blocks, block = self.blocks, op.block & ID_MASK
        if blocks.handle[block] != op.block:
            return STALE
        if blocks.state[block] is not WRITING or blocks.name[block] is not None:
            return NOT_HELD
        for request in op.requests:
            holding = self._holding(request)
            if block not in holding.blocks:
                holding.blocks[block] = None
                blocks.hold((block,))
        return OK

    def _fork(self, op: Fork) -> ForkResult:
        blocks, block = self.blocks, op.block & ID_MASK
        if blocks.handle[block] != op.block:
            return ForkResult(STALE)
        holding = self.requests.get(op.request)
        if holding is None or block not in holding.blocks:
            return ForkResult(NOT_HELD)
        if blocks.state[block] is WRITING and blocks.holders[block] == 1:
            return ForkResult(ResultCode.IN_PLACE)
        if not blocks.available:
            return ForkResult(ResultCode.SHORT)
        (new,) = blocks.reserve(1)
        del holding.blocks[block]
        blocks.drop((block,))
        holding.blocks[new] = None
        return ForkResult(OK, blocks.handle[new])

    def _acquire(self, op: Acquire) -> Boarding:
        request = op.request
        holding = self._holding(request)
        found = self.blocks.index.find(op.keys)
        if holding.own:
            found = found[: next((at for at, key in enumerate(op.keys) if key in holding.own), len(found))]
        if len(found) < op.least_blocks:
            self._fall(request)
            return Boarding(request, (), ResultCode.LOST)
        fresh = dict.fromkeys(block for block in found if block not in holding.blocks)
        self.blocks.hold(fresh)
        holding.blocks.update(fresh)
        boarding = self._boarding[request] = Boarding(request, op.keys, OK, found)
        self._join(boarding, holding)
        self.joins.forget(request)
        return boarding

    def _join(self, boarding: Boarding, holding: Holding) -> None:
        """Waits for the pending keys right behind what was found."""
        keys = self.pending.run(boarding.keys[len(boarding.found) :], boarding.request)
        if keys:
            self.pending.join(keys, boarding.request)
            holding.joins.update(dict.fromkeys(keys))
            boarding.owner = self.pending.owner[keys[0]]
        boarding.joined = len(holding.joins)

    def _acquired(self, boarding: Boarding) -> AcquireResult:
        self._tidy(boarding.request)
        return AcquireResult(boarding.code, self._handles(boarding.found), boarding.joined, boarding.owner)

    def _reserve(self, op: Reserve) -> ReserveResult:
        request = op.request
        if request in self._fell:
            return ReserveResult(SKIPPED)
        holding = self._holding(request)
        boarding = self._boarding.pop(request, None)
        if boarding is not None:
            self._join(boarding, holding)
        need = max(0, op.blocks_total - len(holding.blocks) - len(holding.joins))
        short = need - self.blocks.available
        if short > 0:
            if boarding is not None:
                boarding.found, boarding.joined, boarding.owner = (), 0, NOBODY
            self._fall(request)
            return ReserveResult(ResultCode.SHORT, (), short)
        new = self.blocks.reserve(need)
        self._name(request, holding, op.keys, new)
        holding.blocks.update(dict.fromkeys(new))
        self.hit_blocks += len(boarding.found) if boarding is not None else 0
        self._tidy(request)
        return ReserveResult(OK, self._handles(new))

    def _name(self, request: RequestId, holding: Holding, keys: Sequence[Key], new: Sequence[int]) -> None:
        """Gives the new blocks, in order, to those keys that the request neither holds, computes nor waits for."""
        sealed, owner, name = self.blocks.index.sealed, self.pending.owner, self.blocks.name
        own, joins, held = holding.own, holding.joins, holding.blocks
        if own or joins:
            keys = [key for key in keys if key not in own and key not in joins]
        alone = sealed.keys().isdisjoint(keys)
        if not alone:
            keys = [key for key in keys if sealed.get(key) not in held]
        keys = keys[: len(new)]
        own.update(zip(keys, new, strict=False))
        for block, key in zip(new, keys, strict=False):
            name[block] = key
        if alone and owner.keys().isdisjoint(keys):
            owner.update(dict.fromkeys(keys, request))
        else:
            for key in keys:
                if key not in sealed:
                    owner.setdefault(key, request)
        self.missed_blocks += len(keys)

    def _fall(self, request: RequestId) -> None:
        """The request fell short: it has nothing any more, and its Reserve is skipped."""
        self._release_all(request)
        self._fell.add(request)

    def _holding(self, request: RequestId) -> Holding:
        holding = self.requests.get(request)
        if holding is None:
            holding = self.requests[request] = Holding()
        return holding

    def _tidy(self, request: RequestId) -> None:
        holding = self.requests.get(request)
        if holding is not None and holding.empty:
            del self.requests[request]

    def _handles(self, blocks: Sequence[int]) -> list[Block]:
        return list(map(self.blocks.handle.__getitem__, blocks))
