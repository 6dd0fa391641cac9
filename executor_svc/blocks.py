"""The executor's side of the device blocks: block table, who here holds what, and the grant for decode rows.

The cache owns block metadata; this is what the executor needs to run a step without asking. A table row that is
given back is reused only after the next boundary, because the step in flight still reads it, or the one after that,
if a step was queued behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from executor_svc.live_request import UNKNOWN_BLOCK, LiveRequest
from executor_svc.step_plan import NO_COPIES
from jitney.block_ops import Block, block_id, generation
from jitney.columns import I32, I64


class DeviceBlocks:
    """Block tables `[table rows, blocks of a longest request]` int32, and the count of requests per block."""

    def __init__(self, pool_blocks: int, max_rows: int, blocks_of_longest: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.pool_blocks = pool_blocks
        self.table: I32 = np.zeros((4 * max_rows + 2, blocks_of_longest), np.int32)
        self.holders: I32 = np.zeros(pool_blocks, np.int32)
        self.granted: list[Block] = []
        self._free_rows = list(range(len(self.table) - 1, -1, -1))
        self._retiring: list[int] = []
        self._retired: list[int] = []  # before the last boundary, at which a step was in flight
        self.sharing_changed = False
        self.stored: NDArray[np.bool_] = np.zeros(pool_blocks, np.bool_)  # a copy lies in a lower tier, or did
        self._used_anew: I64 = np.zeros(pool_blocks, np.int64)  # the generation in which a block was last to be written
        self.storing_changed = False
        self.writable: NDArray[np.bool_] = np.ones(pool_blocks, np.bool_)  # the write table: not those that rows share
        self.guarded: set[int] = set()  # requests that compute nothing behind their prompt: others share its last block
        self._forks: dict[tuple[int, int], tuple[int, int]] = {}  # table row and index: block, copy; for the next step

    def open_row(self, request: LiveRequest) -> None:
        """Gives the request a table row."""
        request.table_row = self._free_rows.pop()

    def close_row(self, request: LiveRequest) -> None:
        """Forgets the request's blocks; its table row is reused after the next boundary."""
        self._count(request.blocks, -1)
        for place in [place for place in self._forks if place[0] == request.table_row]:
            del self._forks[place]
        request.blocks = []
        request.joined = []
        request.sealed = 0
        if request.table_row >= 0:
            self._retiring.append(request.table_row)
            request.table_row = -1

    def boundary(self, *, queued: bool = False) -> None:
        """The step in flight has ended: nobody reads retired rows any more. `queued`: but another one that was launched
        meanwhile, which may read those that were retired since the boundary before."""
        self._free_rows += self._retired
        self._retired, self._retiring = self._retiring, []
        if not queued:
            self._free_rows += self._retired
            self._retired = []

    def extend(self, request: LiveRequest, blocks: Sequence[Block]) -> None:
        """Appends blocks (or UNKNOWN_BLOCK for joined keys) to the request's chain."""
        start = len(request.blocks)
        request.blocks += blocks
        self.table[request.table_row, start : len(request.blocks)] = [block_id(b) for b in blocks]
        request.joined += [start + i for i, b in enumerate(blocks) if b == UNKNOWN_BLOCK]
        self._count(blocks, 1)

    def mark_stored(self, blocks: Sequence[Block]) -> None:
        """Copies of these lie in a lower tier. One that was given away while it was copied is another block by now."""
        self.stored[[block_id(b) for b in blocks if generation(b) >= self._used_anew.item(block_id(b))]] = True
        self.storing_changed = True

    def forget_stored(self) -> None:
        """The lower tiers have lost what they had."""
        self.stored[:] = False
        self.storing_changed = True

    def mark_new(self, blocks: Sequence[Block]) -> None:
        """These will be written: they have no copy."""
        ids = [block_id(b) for b in blocks]
        self.stored[ids] = False
        self._used_anew[ids] = [generation(b) for b in blocks]

    def stored_in(self, table_rows: I64, held: I32) -> I32:
        """How many of the first `held` blocks of each table row have a copy lower down; int32 `[rows]`."""
        blocks, inside = self._first_blocks(table_rows, held)
        stored: I32 = (self.stored[blocks] & inside).sum(axis=1, dtype=np.int32)
        return stored

    def fill(self, request: LiveRequest, blocks: Sequence[Block]) -> None:
        """Blocks for the first joined keys of the request, now sealed."""
        for index, block in zip(request.joined, blocks, strict=False):
            request.blocks[index] = block
            self.table[request.table_row, index] = block_id(block)
        del request.joined[: len(blocks)]
        self._count(blocks, 1)

    def fork(self, request: LiveRequest, block: Block, copy: Block) -> None:
        """Puts `copy` in the place of `block`; the next step begins with copying the content. The table is changed by
        `take_forks` only: the step in flight may still read `block` in this row."""
        index = request.blocks.index(block)
        request.blocks[index] = copy
        self._forks[request.table_row, index] = block_id(block), block_id(copy)
        self._count([block], -1)
        self._count([copy], 1)
        self.mark_new([copy])

    @property
    def forks_wait(self) -> bool:
        """Whether the next step will read blocks that nobody may hold any more."""
        return bool(self._forks)

    def take_forks(self) -> I64:
        """Source and target of each copy that the next step begins with, [C, 2], in order. No step is in flight: rows
        that forked find their copies in the table from here on."""
        if not self._forks:
            return NO_COPIES
        for place, (_, copy) in self._forks.items():
            self.table[place] = copy
        copies: I64 = np.array(list(self._forks.values()), np.int64)
        self._forks.clear()
        return copies

    def take_granted(self, request: LiveRequest) -> Block | None:
        """A granted block for the request's next tokens; None when the grant is used up."""
        if not self.granted:
            return None
        block = self.granted.pop()
        self.mark_new([block])
        self.extend(request, [block])
        return block

    def shared(self, table_rows: I64, held: I32) -> I32:
        """How many of the first `held` blocks of each table row have more than one holder here; int32 `[rows]`."""
        blocks, inside = self._first_blocks(table_rows, held)
        shared: I32 = ((self.holders[blocks] > 1) & inside).sum(axis=1, dtype=np.int32)
        return shared

    def _first_blocks(self, table_rows: I64, held: I32) -> tuple[I32, NDArray[np.bool_]]:
        """Blocks `[rows, most held]` of each table row, and which of them are among its first `held`."""
        width = int(held.max(initial=0))
        return self.table[table_rows, :width], np.arange(width) < held[:, None]

    def _count(self, blocks: Iterable[Block], by: int) -> None:
        ids = [block_id(b) for b in blocks if b != UNKNOWN_BLOCK]
        if len(ids) == 1:
            held = self.holders.item(ids[0]) + by
            self.holders[ids[0]] = held
            self.sharing_changed |= held > (1 if by > 0 else 0)
        elif ids:
            counts = self.holders[ids] + by  # a request holds no block twice
            self.holders[ids] = counts
            self.sharing_changed |= bool(counts.max() > (1 if by > 0 else 0))
