"""The order in which cached blocks are evicted: leaves before parents, the least recently used first. O(1) a step.

A cached block is *evictable* once all of its children are evictable, which is when no block behind it is held. It
enters the order at that moment, so that children always stand before their parent, and whoever stands first is a
leaf. A block that is held again, or gets a child that is held, leaves the order, and so do its ancestors.

A request that holds a block holds everything before it, so that these walks end at once; only a request whose block
stayed private (its key was sealed by another) may hold a child and not the parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from itertools import islice

from cache_svc.index import NO_BLOCK, Index
from jitney.block_ops import BlockState


class EvictionOrder:
    """Evictable blocks. `unready[b]` counts the children of b that are not evictable.

    `parent` and `state` are the lists of the index and of the block table, read only here; `cached` is the state of
    blocks that nobody holds. Slots of the lower tiers are ordered just so.
    """

    __slots__ = ("cached", "order", "parent", "state", "unready")

    def __init__(self, index: Index, state: Sequence[IntEnum], cached: IntEnum = BlockState.CACHED) -> None:
        self.parent = parent = index.parent
        self.state = state
        self.cached = cached
        self.order: OrderedDict[int, None] = OrderedDict()
        self.unready: list[int] = [0] * len(parent)

    def __len__(self) -> int:
        return len(self.order)

    def sealed(self, block: int, adopted: Collection[int]) -> None:
        """A block was sealed and is held; `adopted` are the blocks that already stand behind it."""
        self.unready[block] = sum(child not in self.order for child in adopted) if adopted else 0
        self._unready_behind(self.parent[block])

    def sealed_run(self, blocks: Sequence[int]) -> None:
        """Consecutive blocks of a chain were sealed and are held; nothing stands behind them yet."""
        unready = self.unready
        for block in blocks:
            unready[block] = 1
        unready[blocks[-1]] = 0
        self._unready_behind(self.parent[blocks[0]])

    def held(self, block: int) -> None:
        """A cached block got a holder."""
        if block in self.order:
            del self.order[block]
            self._unready_behind(self.parent[block])

    def rested(self, block: int) -> None:
        """The last holder of a block went: it is CACHED now."""
        self.rested_all((block,))

    def rested_all(self, blocks: Sequence[int], generated_tokens: int = 0) -> None:
        """The last holder of these went, children named before parents: all are CACHED by now. So many tokens were
        generated behind them."""
        order, parent, state, unready, cached = self.order, self.parent, self.state, self.unready, self.cached
        for block in blocks:
            while block not in order and not unready[block]:
                order[block] = None
                block = parent[block]
                if block == NO_BLOCK:
                    break
                unready[block] -= 1
                if state[block] is not cached:
                    break

    def lifted(self, block: int) -> None:
        """A cached block is copied, which is no use of it."""
        self.held(block)

    def put_back(self, block: int) -> None:
        """The copy of a block that nobody holds has ended."""
        self.rested(block)

    def next(self, count: int) -> list[int]:
        """So many blocks that go first, or all, in that order."""
        return list(islice(self.order, count))

    def pop(self, count: int) -> list[int]:
        """Takes so many blocks that go first, in that order: each has no children once those before it are gone."""
        pop = self.order.popitem
        return [pop(False)[0] for _ in range(count)]

    def pick(self, doomed: set[int]) -> list[int]:
        """Takes those of `doomed` that are evictable, in order. All that stand behind one must be doomed too."""
        picked = [block for block in self.order if block in doomed]
        for block in picked:
            del self.order[block]
        return picked

    def _unready_behind(self, block: int) -> None:
        """One more child of `block` is not evictable."""
        order, parent, unready = self.order, self.parent, self.unready
        while block != NO_BLOCK:
            unready[block] += 1
            if block not in order:
                return
            del order[block]
            block = parent[block]


OrderOf = Callable[[Index, Sequence[IntEnum], IntEnum], EvictionOrder]
"""Makes the order of eviction from the index and states of blocks, and the state of those that nobody holds."""
