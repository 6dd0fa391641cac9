"""THE state machine of the cache: one Ledger per opened executor, moved by `Ledger.apply` and by nothing else.

It owns which request holds what (`requests`), who computes which key (`pending`), and the block table (`blocks`). No
clock, no random source, no wire: the same batches give the same answers anywhere.

**The algorithm of `apply`.** A batch is checked first; a malformed one is refused whole and changes nothing. Then its
operations run kind by kind, so that what is given back comes before what is taken, and hits are held before anything
is evicted:

1. Seal: the block becomes findable. The first seal of a key wins, a later one leaves its block private. Whoever had
   joined the key holds the block from here on.
2. Withdraw, Release, Swap: pending keys of the request lose their owner and their joiners are told; blocks without a
   holder become CACHED if they are sealed, else FREE. What a Swap has to store first stays pinned until it is stored.
3. Bind, Return, Share, Fork: the blocks of decoding, and copy-on-write.
4. Acquire, for all: hold every sealed block from the start of the chain on, join the pending keys behind them.
5. Reserve, one after the other: join what Reserves before it made pending, then bind blocks for the rest; its keys are
   pending and the request's; the first of them may be loaded from below. One that falls short lets go of all that the
   request has.
6. Grant: blocks for decoding, as many as there are.
7. The lower tiers are tended: what is evicted next is stored there before.

A join ends as a whole: when one of its keys is withdrawn, the joiner is told how many it waited for in all, and joins
or reserves anew. An AcquireResult says all that the request holds of the chain and has joined; what was to be told of
its joins before is folded into it.
"""

from __future__ import annotations

from itertools import islice

from cache_svc.blocks import GRANTED, ID_MASK, SEALED, WRITING, BlockTable
from cache_svc.boarding import Boardings
from cache_svc.checks import check
from cache_svc.holding import Holding
from cache_svc.index import NO_BLOCK, Content, Origin
from cache_svc.pins import Owner
from cache_svc.requests import NOBODY, NOT_HELD, OK
from cache_svc.tiers import Tiers
from jitney.block_ops import (
    Batch,
    BatchAnswer,
    Bind,
    Block,
    Chain,
    ChainHits,
    Fork,
    ForkResult,
    LowerTiers,
    Release,
    RequestId,
    ResultCode,
    Return,
    Seal,
    Share,
    Swap,
    SwapResult,
)
from jitney.keys import Key

STALE = ResultCode.STALE
DUPLICATE = ResultCode.DUPLICATE
NO_TIERS = LowerTiers()


class Ledger(Boardings):
    """Device blocks of one executor, the epoch `owner`; `tiers` are shared with others, None: there are none."""

    def __init__(
        self,
        blocks: BlockTable,
        block_tokens: int,
        tiers: Tiers | None = None,
        owner: Owner = ("", 0),
        fingerprint: bytes = b"",
    ) -> None:
        super().__init__(blocks, block_tokens, None if tiers is None else tiers.attach(owner, blocks, fingerprint))

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
        lower = NO_TIERS if self.below is None else self.below.tend()
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
            lower=lower,
        )

    def lookup(self, chain: Chain) -> ChainHits:
        """How much of the chain there is. No side effects."""
        found = self.blocks.index.find(chain.keys)
        behind = self.pending.run(chain.keys[len(found) :], chain.request)
        evictable = self.blocks.eviction.order
        cpu_blocks, ssd_blocks = 0, 0
        if self.below is not None and not behind:
            cpu_blocks, ssd_blocks = self.below.hits(chain.keys[len(found) :])
        return ChainHits(
            device_blocks=len(found),
            unheld_blocks=sum(block in evictable for block in found),
            cpu_blocks=cpu_blocks,
            ssd_blocks=ssd_blocks,
            pending_blocks=len(behind),
            pending_owner=self.pending.owner[behind[0]] if behind else NOBODY,
        )

    def forget(self, doomed: set[Key]) -> int:
        """Content that nobody may find any more; returns how many blocks had it.

        Those who hold some of it, or compute it, are private from here on: what they compute is nobody else's.
        """
        sealed = self.blocks.index.sealed
        blocks = {sealed[key] for key in doomed if key in sealed}
        for request, holding in list(self.requests.items()):
            if not blocks.isdisjoint(holding.blocks) or not doomed.isdisjoint(holding.own):
                holding.private = True
                self._withdraw_keys(request, holding, list(holding.own))
        self.blocks.forget(blocks)
        return len(blocks)

    def _seal(self, op: Seal) -> list[ResultCode]:
        origin = Origin(op.tenant, op.salt_digest, op.model_version)
        size = 4 * self.block_tokens
        if len(op.blocks) > 1 and self._seal_run(op, origin):
            return [OK] * len(op.blocks)
        codes: list[ResultCode] = []
        parent = op.parent
        for at, (handle, key) in enumerate(zip(op.blocks, op.keys, strict=True)):
            codes.append(self._seal_one(op, at, handle, key, parent, origin, size))
            parent = key
        return codes

    def _seal_run(self, op: Seal, origin: Origin) -> bool:
        """The usual prompt in one go: the next blocks, each reserved for its key, and nobody waits for any of them.

        False, with nothing changed, if something about it is unusual. A block with a name is written by its request
        alone. From here on the keys are those of the Reserve, whose hashes are known.
        """
        holding, count = self.requests.get(op.request), len(op.blocks)
        if holding is None:
            return False
        own, table, pending = holding.own, self.blocks, self.pending
        keys = list(islice(own, count))
        if keys != op.keys or op.parent in own:
            return False
        blocks = list(islice(own.values(), count))
        if self._handles(blocks) != op.blocks:
            return False
        for known in (table.index.sealed, table.index.orphans, pending.joiners):
            if known and not known.keys().isdisjoint(keys):
                return False
        table.seal_run(blocks, keys, op.parent, Content(op.token_ids, origin))
        if len(own) == count:
            own.clear()
        else:
            for key in keys:
                del own[key]
        pop = pending.owner.pop
        for key in keys:
            pop(key, None)
        if self.below is not None and holding.places:
            for block, key in zip(blocks, keys, strict=True):
                if key in holding.places:
                    self.below.keep(block)
        return True

    def _seal_one(
        self, op: Seal, at: int, handle: Block, key: Key, parent: Key, origin: Origin, size: int
    ) -> ResultCode:
        blocks, block = self.blocks, handle & ID_MASK
        if blocks.handle[block] != handle:
            return STALE
        holding = self.requests.get(op.request)
        if holding is None or block not in holding.blocks:
            return NOT_HELD
        if blocks.state[block] is not WRITING or blocks.shared(block):
            return OK if blocks.index.key[block] == key else NOT_HELD  # a repeat; or nobody may write it
        name = blocks.name[block]
        if name is not None and name != key:
            self._withdraw_keys(op.request, holding, [name])
        if key in blocks.index.sealed or holding.private:
            return DUPLICATE
        blocks.seal(block, key, parent, Content(op.token_ids[at * size : (at + 1) * size], origin))
        if name == key:
            del holding.own[key]
        place = self.below is not None and self._is_place(holding, block, key, name)
        for joiner in self.pending.settle(key):
            waiting = self.requests[joiner]
            del waiting.joins[key]
            if block not in waiting.blocks:
                waiting.blocks[block] = None
                blocks.hold((block,))
            place = place or key in waiting.places
            self.hit_blocks += 1
            self.joins.sealed(joiner, handle)
        if place and self.below is not None:
            self.below.keep(block)
        return OK

    def _is_place(self, holding: Holding, block: int, key: Key, name: Key | None) -> bool:
        """Whether the SSD shall keep the chain up to a block that is sealed now: it stands at a place that its Reserve
        named, or so many blocks of an answer end with it."""
        if name is None:
            holding.tip = block
            holding.answered += 1
            assert self.below is not None
            return holding.answered % self.below.interval_blocks == 0
        return key in holding.places

    def _withdraw(self, request: RequestId) -> ResultCode:
        holding = self.requests.get(request)
        if holding is None:
            return NOT_HELD
        self._withdraw_keys(request, holding, list(holding.own))
        return OK

    def _release(self, op: Release) -> list[ResultCode]:
        if not op.blocks:
            return [self._ended(op.request, op.generated_tokens)]
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

    def _ended(self, request: RequestId, generated_tokens: int) -> ResultCode:
        """The request wants nothing any more: neither what it holds nor what is pinned for it."""
        below = self.below
        if below is None:
            return self._release_all(request, generated_tokens)
        holding = self.requests.get(request)
        if holding is not None and holding.tip != NO_BLOCK and self.blocks.state[holding.tip] is SEALED:
            below.keep(holding.tip)
        had_pins = below.released(request)
        code = self._release_all(request, generated_tokens)
        return OK if had_pins else code

    def _swap(self, op: Swap) -> SwapResult:
        """Without a tier below, what was sealed is cached here, as when it is released."""
        holding = self.requests.get(op.request)
        pinned = leaving = 0
        if self.below is not None and holding is not None:
            chain = self._chain_of(holding)
            pinned, leaving = self.below.swap(op.request, chain, op.tier)
        return SwapResult(self._release_all(op.request), pinned, leaving)

    def _chain_of(self, holding: Holding) -> list[int]:
        """The sealed blocks that the request holds, and those that they stand behind: parents before children."""
        state, parent = self.blocks.state, self.blocks.index.parent
        chain: dict[int, None] = {}
        for block in holding.blocks:
            path: list[int] = []
            while state[block] is not WRITING and block not in chain:
                path.append(block)
                block = parent[block]
                if block == NO_BLOCK:
                    break
            chain.update(dict.fromkeys(reversed(path)))
        return list(chain)

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
        if blocks.state[block] is WRITING and not blocks.shared(block):
            return ForkResult(ResultCode.IN_PLACE)
        if not blocks.available:
            return ForkResult(ResultCode.SHORT)
        (new,) = blocks.reserve(1)
        del holding.blocks[block]
        blocks.drop((block,))
        holding.blocks[new] = None
        return ForkResult(OK, blocks.handle[new])
