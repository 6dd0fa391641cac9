"""The table of one executor's device blocks: every move between states is a method here, and nowhere else.

    FREE --grant--> GRANTED --bind--> WRITING --seal--> SEALED <--hold / drop--> CACHED --evict--> FREE
      \\------------reserve------------^   \\--drop--> FREE
    GRANTED --give_back--> FREE

Invariants: a block is in one state; `holders[b]` is the number of requests that hold b and of copies that pin it (these
alone: `pins[b]`), above zero exactly for WRITING and SEALED; every SEALED and CACHED block is in the index, no other
is; a freed block's generation rises, so that its old handles are stale. Generations start at 1: the handle 0 names no
block.

`name[b]` of a WRITING block is the key that its request reserved it for, None if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cache_svc.eviction import EvictionOrder, OrderOf
from cache_svc.index import NO_BLOCK, Content, Index
from jitney.block_ops import Block, BlockState, Counts
from jitney.keys import Key

FREE = BlockState.FREE
GRANTED = BlockState.GRANTED
WRITING = BlockState.WRITING
SEALED = BlockState.SEALED
CACHED = BlockState.CACHED

ID_MASK = 0xFFFFFFFF
NEXT_GENERATION = 1 << 32


class BlockTable:
    """States, holders and handles of `total` blocks, indexed by block id. `pinned` are those with pins.

    `evicting(blocks)` is told of blocks that are about to be evicted.
    """

    __slots__ = (
        "evicted",
        "evicting",
        "eviction",
        "free",
        "granted",
        "handle",
        "holders",
        "index",
        "name",
        "pinned",
        "pins",
        "state",
        "total",
    )

    def __init__(
        self, total: int, generation: int = 1, index: Index | None = None, order: OrderOf = EvictionOrder
    ) -> None:
        self.total = total
        self.state: list[BlockState] = [FREE] * total
        self.holders: list[int] = [0] * total
        self.pins: list[int] = [0] * total
        self.pinned: set[int] = set()
        self.evicting: Callable[[Sequence[int]], None] | None = None
        self.handle: list[Block] = [Block(generation << 32 | block) for block in range(total)]
        self.name: list[Key | None] = [None] * total
        self.free: list[int] = list(range(total - 1, -1, -1))
        self.granted = 0
        self.evicted = 0
        self.index = index or Index(total)
        self.eviction = order(self.index, self.state, CACHED)

    @property
    def available(self) -> int:
        """Blocks that can be had now."""
        return len(self.free) + len(self.eviction)

    def counts(self) -> Counts:
        """What the blocks are good for.

        *Leaving* are blocks that no request holds and that come free, or evictable, when a copy has ended: those that
        copies pin, and the cached ones that stand before them.
        """
        leaving = self._leaving() if self.pinned else 0
        return Counts(len(self.free), len(self.eviction), leaving, self.granted, self.total)

    def _leaving(self) -> int:
        state, parent = self.state, self.index.parent
        leaving: set[int] = set()
        for block in self.pinned:
            if self.holders[block] > self.pins[block]:
                continue
            leaving.add(block)
            before = parent[block] if state[block] is SEALED else NO_BLOCK
            while before != NO_BLOCK and state[before] is CACHED and before not in leaving:
                leaving.add(before)
                before = parent[before]
        return len(leaving)

    def shared(self, block: int) -> bool:
        """Whether more than one request holds it, so that nobody may write it."""
        return self.holders[block] > 1 and self.holders[block] - self.pins[block] > 1

    def pin(self, blocks: Iterable[int]) -> None:
        """A copy of each has to end before it can be had: WRITING and SEALED ones stay what they are without a holder,
        CACHED -> SEALED."""
        blocks = list(blocks)
        self._hold(blocks, self.eviction.lifted)
        for block in blocks:
            self.pins[block] += 1
        self.pinned.update(blocks)

    def unpin(self, blocks: Iterable[int]) -> None:
        """A copy of each has ended."""
        blocks = list(blocks)
        for block in blocks:
            self.pins[block] -= 1
            if not self.pins[block]:
                self.pinned.discard(block)
        for block in self._drop(blocks):
            self.eviction.put_back(block)

    def grant(self, wanted: int) -> list[int]:
        """FREE -> GRANTED, as many as there are."""
        blocks = self._take(min(wanted, self.available))
        for block in blocks:
            self.state[block] = GRANTED
        self.granted += len(blocks)
        return blocks

    def give_back(self, block: int) -> None:
        """GRANTED -> FREE."""
        self.granted -= 1
        self._freed((block,))

    def bind(self, block: int) -> None:
        """GRANTED -> WRITING, with its first holder."""
        self.granted -= 1
        self.state[block] = WRITING
        self.holders[block] = 1

    def reserve(self, wanted: int) -> list[int]:
        """FREE -> WRITING, with its first holder. There must be so many `available`."""
        state, holders = self.state, self.holders
        blocks = self._take(wanted)
        for block in blocks:
            state[block] = WRITING
            holders[block] = 1
        return blocks

    def seal(self, block: int, key: Key, parent_key: Key, content: Content) -> None:
        """WRITING -> SEALED, under a key that no other block has."""
        self.name[block] = None
        self.state[block] = SEALED
        adopted = self.index.add(block, key, parent_key, content)
        self.eviction.sealed(block, adopted)

    def seal_run(self, blocks: Sequence[int], keys: Sequence[Key], parent_key: Key, content: Content) -> None:
        """WRITING -> SEALED for consecutive blocks of a chain, with the content of all; none has orphans."""
        name, state = self.name, self.state
        for block in blocks:
            name[block] = None
            state[block] = SEALED
        self.index.add_run(blocks, keys, parent_key, content)
        self.eviction.sealed_run(blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder of each: CACHED -> SEALED; WRITING and SEALED ones stay what they are."""
        self._hold(blocks, self.eviction.held)

    def _hold(self, blocks: Iterable[int], held: Callable[[int], None]) -> None:
        state, holders = self.state, self.holders
        for block in blocks:
            holders[block] += 1
            if state[block] is CACHED:
                state[block] = SEALED
                held(block)

    def drop(self, blocks: Iterable[int], generated_tokens: int = 0) -> None:
        """One holder less of each, which has generated so many tokens: without any, SEALED -> CACHED and WRITING ->
        FREE."""
        self.eviction.rested_all(self._drop(blocks), generated_tokens)

    def _drop(self, blocks: Iterable[int]) -> list[int]:
        """Those that are CACHED now; the order of eviction is yet to be told."""
        state, holders = self.state, self.holders
        rested: list[int] = []
        freed: list[int] = []
        for block in blocks:
            holders[block] -= 1
            if holders[block]:
                continue
            if state[block] is SEALED:
                state[block] = CACHED
                rested.append(block)
            else:
                freed.append(block)
        self._freed(freed)
        return rested

    def forget(self, doomed: set[int]) -> None:
        """CACHED -> FREE, and SEALED -> WRITING: private content of those who hold it. All that stands behind a doomed
        block has to be doomed."""
        for block in doomed:
            if self.state[block] is SEALED:
                self.state[block] = CACHED
                self.eviction.rested(block)
        blocks = self.eviction.pick(doomed)
        self.index.remove(blocks)
        for block in blocks:
            if self.holders[block]:
                self.state[block] = WRITING
        self._freed(block for block in blocks if not self.holders[block])

    def _take(self, wanted: int) -> list[int]:
        """FREE blocks, evicting what is missing. The caller sets their state."""
        free = self.free
        if wanted > len(free):
            evicted = self.eviction.pop(wanted - len(free))
            if self.evicting is not None:
                self.evicting(evicted)
            self.index.remove(evicted)
            handle = self.handle
            for block in evicted:
                handle[block] += NEXT_GENERATION  # type: ignore[call-overload]
            free += evicted
            self.evicted += len(evicted)
        keep = len(free) - wanted
        taken = free[keep:]
        del free[keep:]
        taken.reverse()
        return taken

    def _freed(self, blocks: Iterable[int]) -> None:
        state, handle, name, free = self.state, self.handle, self.name, self.free
        for block in blocks:
            state[block] = FREE
            name[block] = None
            handle[block] += NEXT_GENERATION  # type: ignore[call-overload]
            free.append(block)
