"""Which device blocks are stored below because they are evicted next.

The front of the eviction order is looked at when something has changed there, not with every batch: to look costs more
than all else in a batch that changes little. What was seen and has no copy below waits here until there is room for it.
"""

from __future__ import annotations

from collections.abc import Collection

from cache_svc.blocks import CACHED, BlockTable
from cache_svc.lower import Lower
from jitney.keys import Key

LOOKED_AHEAD = 256
"""Blocks of the eviction order that are looked at."""
LOW_PART = 8
"""Of the device's blocks, one in so many shall be free, or evictable at no loss."""
SAME_PART = 4
"""What is ahead counts as seen until one in so many of it may be others."""


class Demotion:
    """`low` blocks shall be free, or stored below. `spare` are the keys ahead: none makes room for another."""

    def __init__(self, lower: Lower, table: BlockTable) -> None:
        self.lower = lower
        self.table = table
        self.low = max(1, table.total // LOW_PART)
        self.spare: Collection[Key | None] = ()
        self._ahead: list[tuple[int, Key | None]] = []  # nearest to eviction last
        self._seen = 0
        self._evicted = table.evicted
        self._gone = 0  # blocks that were evicted for the last batch

    def stepped(self) -> None:
        """A batch was run."""
        self._gone, self._evicted = self.table.evicted - self._evicted, self.table.evicted

    def next(self, most: int) -> list[int]:
        """Blocks to be stored now, parents before their children.

        Where more are evicted at a time than can be in flight, it is those behind them that can be copied in time.
        """
        table, lower = self.table, self.lower
        lack = min(self.low - len(table.free), LOOKED_AHEAD)
        if lack <= 0:
            return []
        changes = 2 * table.evicted + len(table.eviction) - len(table.free) + 1
        if abs(changes - self._seen) * SAME_PART >= lack:
            self._seen = changes
            self._look(lack, most)
        state, key_of = table.state, table.index.key
        blocks: list[int] = []
        while self._ahead and len(blocks) < most:
            block, key = self._ahead.pop()
            if state[block] is CACHED and key_of[block] == key and not lower.has(key):
                blocks.append(block)
        blocks.reverse()
        return blocks

    def _look(self, lack: int, most: int) -> None:
        table, key, has = self.table, self.table.index.key, self.lower.has
        skipped = self._gone if self._gone >= most else 0
        front = table.eviction.next(skipped + lack)
        if len(front) > skipped:
            del front[:skipped]
        self.spare = {key[block] for block in front}
        self._ahead = [(block, key[block]) for block in reversed(front) if not has(key[block])]
