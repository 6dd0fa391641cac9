"""What one request has in the ledger, and what it must be told."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from cache_svc.index import NO_BLOCK
from jitney.block_ops import Block, JoinEvent, RequestId
from jitney.keys import Key


@dataclass(slots=True)
class Holding:
    """One request. `blocks` are the ids that it holds, in the order in which it got them.

    `own` are the keys that it reserved blocks for and has not sealed: pending ones, and ones that another request
    sealed or computes too (their block stays private). `joins` are the keys that it waits for; they stand behind all
    sealed blocks that it holds and before its own keys.

    A *private* request holds content that was invalidated: what it seals is not findable. `places` are keys of its
    prompt behind which the SSD shall let a hit end; `tip` is the last block of its answer that was sealed, of
    `answered`.
    """

    blocks: dict[int, None] = field(default_factory=dict)
    own: dict[Key, int] = field(default_factory=dict)
    joins: dict[Key, None] = field(default_factory=dict)
    places: Collection[Key] = ()
    tip: int = NO_BLOCK
    answered: int = 0
    private: bool = False

    @property
    def empty(self) -> bool:
        """Whether it has nothing at all."""
        return not (self.blocks or self.joins)


class Joins:
    """What became of joined keys in a batch, per request, in the order in which it happened."""

    __slots__ = ("_sealed", "_withdrawn")

    def __init__(self) -> None:
        self._sealed: dict[RequestId, list[Block]] = {}
        self._withdrawn: dict[RequestId, int] = {}

    def sealed(self, request: RequestId, block: Block) -> None:
        """The next joined key was sealed: the request holds this block now."""
        self._sealed.setdefault(request, []).append(block)

    def withdrawn(self, request: RequestId, keys: int) -> None:
        """So many keys that the request had joined are computed by nobody any more."""
        self._sealed.setdefault(request, [])
        self._withdrawn[request] = self._withdrawn.get(request, 0) + keys

    def forget(self, request: RequestId) -> None:
        """The request was told otherwise, or has let go of everything."""
        self._sealed.pop(request, None)
        self._withdrawn.pop(request, None)

    def take(self) -> list[JoinEvent]:
        """One event a request; starts anew."""
        events = [
            JoinEvent(request, blocks, self._withdrawn.get(request, 0)) for request, blocks in self._sealed.items()
        ]
        self._sealed.clear()
        self._withdrawn.clear()
        return events
