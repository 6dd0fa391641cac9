"""What the requests of one executor have on its device: blocks that they hold, keys that they compute, joins.

The lowest layer of the ledger: letting go, and telling those who waited for what will not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache_svc.below import Below
from cache_svc.blocks import BlockTable
from cache_svc.holding import Holding, Joins
from cache_svc.pending import Pending
from jitney.block_ops import Block, RequestId, ResultCode
from jitney.keys import Key

OK = ResultCode.OK
NOT_HELD = ResultCode.NOT_HELD
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


class Requests:
    """`boarding` are the Acquires of the batch that is run, by request. `below` is None without lower tiers."""

    def __init__(self, blocks: BlockTable, block_tokens: int, below: Below | None) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.below = below
        self.requests: dict[RequestId, Holding] = {}
        self.pending = Pending()
        self.joins = Joins()
        self.hit_blocks = 0
        self.missed_blocks = 0
        self._boarding: dict[RequestId, Boarding] = {}

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

    def _release_all(self, request: RequestId, generated_tokens: int = 0) -> ResultCode:
        self.joins.forget(request)
        holding = self.requests.get(request)
        if holding is None:
            return NOT_HELD
        if holding.own:
            self._withdraw_keys(request, holding, list(holding.own))
        if holding.joins:
            self.pending.leave(holding.joins, request)
        self.blocks.drop(reversed(holding.blocks), generated_tokens)
        del self.requests[request]
        return OK

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
