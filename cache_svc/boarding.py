"""How requests board: Acquire what there is of the chain, Reserve blocks for the rest, load what lies below.

A second layer of the ledger. What is loaded are the first of the new blocks, as far as their keys follow directly what
was found: nothing behind a join, since it would be there before what it stands on.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_svc.below import Below, Opened
from cache_svc.blocks import BlockTable
from cache_svc.holding import Holding
from cache_svc.requests import NOBODY, OK, Boarding, Requests
from jitney.block_ops import Acquire, AcquireResult, RequestId, Reserve, ReserveResult, ResultCode
from jitney.keys import Key

SKIPPED = ResultCode.SKIPPED


class Boardings(Requests):
    """`_fell` are the requests that fell short in the batch that is run."""

    def __init__(self, blocks: BlockTable, block_tokens: int, below: Below | None) -> None:
        super().__init__(blocks, block_tokens, below)
        self._fell: set[RequestId] = set()

    def _acquire(self, op: Acquire) -> Boarding:
        request = op.request
        holding = self._holding(request)
        found = self.blocks.index.find(op.keys)
        if holding.own:
            found = found[: next((at for at, key in enumerate(op.keys) if key in holding.own), len(found))]
        if len(found) < op.least_blocks:
            self._fall(request)
            return Boarding(request, (), ResultCode.LOST)
        held = holding.blocks
        fresh = [block for block in found if block not in held] if held else found
        self.blocks.hold(fresh)
        held.update(dict.fromkeys(fresh))
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
        fresh = not (holding.own or holding.joins or holding.private)
        first = 0 if boarding is None or boarding.keys is not op.keys else len(boarding.found)  # these it holds
        named = self._name(request, holding, op.keys[first:], new)
        holding.blocks.update(dict.fromkeys(new))
        self.hit_blocks += len(boarding.found) if boarding is not None else 0
        opened = None if self.below is None else self._board_below(op, holding, boarding, named if fresh else (), new)
        self._tidy(request)
        if opened is None:
            return ReserveResult(OK, self._handles(new))
        return ReserveResult(OK, self._handles(new), 0, opened.ticket, opened.cpu_blocks, opened.ssd_blocks)

    def _board_below(
        self, op: Reserve, holding: Holding, boarding: Boarding | None, named: Sequence[Key], new: Sequence[int]
    ) -> Opened | None:
        """Begins to load the first `new` blocks, if their keys, `named`, follow directly what the request holds."""
        below = self.below
        assert below is not None
        opened = None
        if op.load_blocks and named:
            behind = op.keys[op.keys.index(named[0]) :]
            run = [key for key, next_key in zip(named, behind, strict=False) if key == next_key]
            opened = below.load(op.request, run, new, op.load_blocks)
        if below.keeps and boarding is not None and op.keys:
            loaded = 0 if opened is None else opened.cpu_blocks + opened.ssd_blocks
            self._keep_places(op.keys, holding, len(boarding.found) + boarding.joined + loaded)
        below.boarded(op.request)
        return opened

    def _keep_places(self, keys: Sequence[Key], holding: Holding, hits: int) -> None:
        """The SSD shall have the prompt up to its end, up to every so many blocks, and up to where it parts from what
        was there before. What is not sealed yet is kept when it is."""
        below = self.below
        assert below is not None
        step = below.interval_blocks
        places = {keys[-1], *keys[step - 1 :: step]} if hits < len(keys) else set()
        if hits:
            part = keys[min(hits, len(keys)) - 1]
            block = self.blocks.index.sealed.get(part)
            if block is not None:
                below.keep(block)
            else:
                places.add(part)
        holding.places = places

    def _name(self, request: RequestId, holding: Holding, keys: Sequence[Key], new: Sequence[int]) -> Sequence[Key]:
        """Gives the new blocks, in order, to those keys that the request neither holds, computes nor waits for."""
        sealed, owner, name = self.blocks.index.sealed, self.pending.owner, self.blocks.name
        own, joins, held = holding.own, holding.joins, holding.blocks
        if holding.private:
            return ()
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
        return keys

    def _fall(self, request: RequestId) -> None:
        """The request fell short: it has nothing any more, and its Reserve is skipped."""
        self._release_all(request)
        self._fell.add(request)
