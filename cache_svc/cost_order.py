"""The cost-aware order of eviction: leaves first, the one that is least worth keeping before all others.

What a block is worth is the cost of computing it again, which grows with its depth, times the hits that it is expected
to earn per time (`cache_svc.reuse`), by the class of its uses so far and its age. Leaves wait in one heap a class, the
longest unused on top. As values never rise with the age, the next victim is one of the tops; when it goes and leaves
its parent a leaf, the parent goes too as long as no other top is worth less, so that a chain goes in one sweep.

**Classes.** How often a block was used. Whether the request that used it last added new blocks behind it. For blocks
that were used once: how many were new at the same time, and whether they went on from a chain that was there. For all:
how many tokens the request that used it last has generated, for a short answer is asked of other prompts than a long
one.

**Memory.** Uses of evicted blocks are remembered by key, for twice as many as there are blocks. One block of 2^n, by
its key, is *watched*: its ages at reuse feed the profile, past its eviction too, for an order that learns only from
what it kept would never learn that it evicts the wrong ones.

**The guard.** Of all watched blocks, held and evicted, LRU would hold the youngest and this order those of the highest
value, as many as there is room for. When a watched block is used that only one of them would have held, it counts for
that one, whichever is in force. Unless this order wins 30 % more of them than it loses, it is that of LRU.

Time is the number of blocks that came to rest: no clock, no random source; the same calls give the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from enum import IntEnum
from heapq import heapify, heappop, heappush

import numpy as np

from cache_svc.eviction import EvictionOrder, OrderOf
from cache_svc.index import NO_BLOCK, Index
from cache_svc.reuse import ReuseProfile, age_bucket
from jitney.block_ops import BlockState
from jitney.keys import Key

NEVER = -1
TIME_BITS = 48
TIME_MASK = (1 << TIME_BITS) - 1
SIZES = 8
"""Classes of how many blocks were new at once: by doubling, the last from 64 on."""
USED_AGAIN = 2 * SIZES
HABITS = USED_AGAIN + 2 * 3
ANSWERS = 7
"""Classes of how many tokens were generated: up to 15, then by doubling, the last from 512 on."""
MOST_WATCHED = 1 << 14
WATCHED_PER_BLOCK = 4
REMEMBERED_PER_BLOCK = 2
MOST_REMEMBERED = 1 << 18
TRUST_PERCENT = 130
"""Hits that only this order would have had, to those that only LRU would have: below, the order is that of LRU."""
FORGET = 3
"""Of both, one in 2^FORGET is forgotten at each learning."""
LEAST_LEARNED_FROM = 1000
"""Blocks sealed between one learning and the next, or a quarter of all."""
LEAST_BLOCKS = 512
"""A smaller pool is LRU's: of the few prompts that it holds at a time there is too little to learn."""
ATTENTION_BLOCKS = 2048
"""Depth at which a block costs twice as much to compute as at the start: 32k tokens in blocks of 16, where attention
takes as long as all else in models of some 8B parameters."""


class CostOrder(EvictionOrder):
    """Evictable blocks by what they are worth. `kids[b]` counts the blocks that stand behind b.

    `last[b]` is when b came to rest last, NEVER since it was sealed; `kind[b]` its class then; `start[b]` the first of
    the blocks that were sealed one behind the other with it.
    """

    __slots__ = (
        "_adds",
        "_before",
        "_clock",
        "_heaps",
        "_lost",
        "_most_watched",
        "_profile",
        "_pushed",
        "_remembered",
        "_sealed",
        "_threshold",
        "_trusted",
        "_watch_mask",
        "_watched",
        "_won",
        "_youth",
        "depth",
        "key",
        "kids",
        "kind",
        "last",
        "length",
        "start",
        "uses",
        "watch",
    )

    def __init__(self, index: Index, state: Sequence[IntEnum], cached: IntEnum = BlockState.CACHED) -> None:
        super().__init__(index, state, cached)
        total = len(self.parent)
        self.key = index.key
        self.kids = [0] * total
        self.depth = [0] * total
        self.start = [0] * total
        self.length = [0] * total
        self.uses = [0] * total
        self.last = [NEVER] * total
        self.kind = [0] * total
        self.watch = [False] * total
        self._clock = 0
        self._before = NO_BLOCK  # the parent of what came to rest last
        self._adds = False  # whether what came to rest before, in a row, was new
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        self._pushed = 0
        self._profile = ReuseProfile(HABITS, ANSWERS)
        self._remembered: OrderedDict[Key, int] = OrderedDict()
        self._watched: OrderedDict[Key, int] = OrderedDict()  # class << TIME_BITS | when it came to rest
        self._watch_mask = min(255, (1 << (WATCHED_PER_BLOCK * total // MOST_WATCHED).bit_length()) - 1)
        self._most_watched = min(MOST_WATCHED, WATCHED_PER_BLOCK * total // (self._watch_mask + 1) + 64)
        self._sealed = 0
        self._youth = 0  # LRU would hold what is as young as this
        self._threshold = (0.0, 0)  # and this order what has such a value, and at that one such an age (negated)
        self._won = 0  # hits that only this order would have had, and only LRU
        self._lost = 0
        self._trusted = True

    def sealed(self, block: int, adopted: Collection[int]) -> None:
        super().sealed(block, adopted)
        self._enter((block,), len(adopted))

    def sealed_run(self, blocks: Sequence[int]) -> None:
        super().sealed_run(blocks)
        self._enter(blocks, 0)

    def _enter(self, blocks: Sequence[int], adopted: int) -> None:
        """Blocks of a chain are new; so many stand behind the last one."""
        kids, uses, last, depths, starts, watch = self.kids, self.uses, self.last, self.depth, self.start, self.watch
        remembered, watched, keys, mask = self._remembered, self._watched, self.key, self._watch_mask
        parent = self.parent[blocks[0]]
        depth, start = 0, blocks[0]
        if parent != NO_BLOCK:
            kids[parent] += 1
            depth = depths[parent] + 1
            if last[parent] == NEVER:
                start = starts[parent]
        for block in blocks:
            key = keys[block]
            assert key is not None
            kids[block] = 1
            uses[block] = remembered.pop(key, 0)
            last[block] = NEVER
            depths[block] = depth
            starts[block] = start
            depth += 1
            watch[block] = watches = not key[0] & mask
            if watches and key in watched:
                self._used_again(key)
        kids[blocks[-1]] = adopted
        self.length[start] = depth - depths[start]
        self._sealed += len(blocks)
        if self._sealed >= max(LEAST_LEARNED_FROM, len(kids) // 4) and len(kids) >= LEAST_BLOCKS:
            self._learn()

    def held(self, block: int) -> None:
        if self.watch[block]:
            key = self.key[block]
            if key in self._watched:
                self._used_again(key)
        super().held(block)

    def rested_all(self, blocks: Sequence[int], generated_tokens: int = 0) -> None:
        uses, last, kinds, starts, watch = self.uses, self.last, self.kind, self.start, self.watch
        parents, kids, now, before, adds = self.parent, self.kids, self._clock, self._before, self._adds
        leaves = []
        answer = min(max(0, generated_tokens.bit_length() - 4), ANSWERS - 1)
        of_start, once = NO_BLOCK, 0
        for block in blocks:
            now += 1
            if block != before:
                adds = False
            before = parents[block]
            if last[block] == NEVER:
                adds = True
            last[block] = now
            used = uses[block]
            uses[block] = used + 1
            if used:
                habit = USED_AGAIN + 3 * adds + (used - 1 if used < 3 else 2)
            else:
                if starts[block] != of_start:
                    of_start = starts[block]
                    new = min(self.length[of_start].bit_length() - 1, SIZES - 1)
                    once = 2 * new + (self.depth[of_start] > 1)
                habit = once
            kinds[block] = kind = habit * ANSWERS + answer
            if watch[block]:
                self._look(block, kind, now)
            if not kids[block]:
                leaves.append(block)
        self._clock, self._before, self._adds = now, before, adds
        super().rested_all(blocks)
        self._push_evictable(leaves)

    def lifted(self, block: int) -> None:
        super().held(block)

    def put_back(self, block: int) -> None:
        if self.last[block] == NEVER:
            self.rested(block)
        else:
            super().rested_all((block,))
            self._push_evictable((block,))

    def _push_evictable(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self.kids[block] and block in self.order:
                self._push(block)

    def next(self, count: int) -> list[int]:
        if count >= len(self.order):
            count = len(self.order)
        chosen = self._take(count)
        for block in reversed(chosen):
            self.order[block] = None
            self.order.move_to_end(block, last=False)
            if self.parent[block] != NO_BLOCK:
                self.kids[self.parent[block]] += 1
        for block in chosen:
            if not self.kids[block]:
                self._push(block)
        return chosen

    def pop(self, count: int) -> list[int]:
        chosen = self._take(count)
        remembered, key, uses = self._remembered, self.key, self.uses
        for block in chosen:
            name = key[block]
            assert name is not None
            remembered[name] = uses[block]
        most = min(REMEMBERED_PER_BLOCK * len(self.parent), MOST_REMEMBERED)
        while len(remembered) > most:
            remembered.popitem(last=False)
        return chosen

    def pick(self, doomed: set[int]) -> list[int]:
        picked = super().pick(doomed)
        for block in picked:
            self._leaves(block)
        return picked

    def _leaves(self, block: int) -> None:
        """The block is gone from before its parent."""
        parent = self.parent[block]
        if parent != NO_BLOCK:
            self.kids[parent] -= 1
            if not self.kids[parent] and parent in self.order:
                self._push(parent)

    def _push(self, block: int) -> None:
        heap = self._heaps.get(self.kind[block])
        if heap is None:
            heap = self._heaps[self.kind[block]] = []
        heappush(heap, (self.last[block], block))
        self._pushed += 1
        if self._pushed > 2 * len(self.parent) + 64:
            self._pushed = 0
            for heap in self._heaps.values():
                heap[:] = set(filter(self._waits, heap))
                heapify(heap)
                self._pushed += len(heap)

    def _waits(self, entry: tuple[int, int]) -> bool:
        """Whether it is an evictable leaf still, unused since it was pushed."""
        last, block = entry
        return self.last[block] == last and block in self.order and not self.kids[block]

    def _take(self, count: int) -> list[int]:
        """Takes the `count` blocks that go first out of the order."""
        order, kids, parents, heaps = self.order, self.kids, self.parent, self._heaps
        taken: list[int] = []
        while len(taken) < count:
            tops = []
            for heap in heaps.values():
                while heap and not self._waits(heap[0]):
                    heappop(heap)
                    self._pushed -= 1
                if heap:
                    tops.append(self._worth(heap[0][1]))
            tops.sort()
            block = heappop(heaps[self.kind[tops[0][2]]])[1]
            self._pushed -= 1
            while True:
                taken.append(block)
                del order[block]
                parent = parents[block]
                if parent == NO_BLOCK:
                    break
                kids[parent] -= 1
                if kids[parent] or parent not in order:
                    break
                if len(taken) == count or (len(tops) > 1 and tops[1] < self._worth(parent)):
                    self._push(parent)
                    break
                block = parent
        return taken

    def _worth(self, block: int) -> tuple[float, int, int]:
        """What it is worth to keep, its last use, itself: lowest goes first."""
        last = self.last[block]
        if not (self._trusted and self._profile.values):
            return 0.0, last, block
        value = self._profile.values[self.kind[block]][age_bucket(self._clock - last)]
        return value * (ATTENTION_BLOCKS + self.depth[block]), last, block

    def _look(self, block: int, kind: int, now: int) -> None:
        """A watched block came to rest."""
        key = self.key[block]
        assert key is not None
        self._watched.pop(key, None)
        self._watched[key] = kind << TIME_BITS | now
        if len(self._watched) > self._most_watched:
            _, seen = self._watched.popitem(last=False)
            self._profile.gone(seen >> TIME_BITS, now - (seen & TIME_MASK))

    def _used_again(self, key: Key | None) -> None:
        """A watched block was used again, or computed again after it had been evicted."""
        assert key is not None
        seen = self._watched.pop(key)
        kind, age = seen >> TIME_BITS, self._clock - (seen & TIME_MASK)
        self._profile.used(kind, age)
        if self._profile.values:
            value = self._profile.values[kind][age_bucket(age)]
            ours, theirs = (value, -age) >= self._threshold, age <= self._youth
            self._won += ours and not theirs
            self._lost += theirs and not ours

    def _learn(self) -> None:
        self._sealed = 0
        if not self._watched:
            return
        watched = np.fromiter(self._watched.values(), np.int64, len(self._watched))
        ages = self._clock - (watched & TIME_MASK)
        values = self._profile.learn(watched >> TIME_BITS, ages)
        room = min(len(self.order) // (self._watch_mask + 1), len(ages) - 1)
        self._youth = int(ages[len(ages) - 1 - room])  # they stand in the order of their last use
        last_in = int(np.lexsort((ages, -values))[room])
        self._threshold = (float(values[last_in]), -int(ages[last_in]))
        self._trusted = self._won * 100 >= self._lost * TRUST_PERCENT
        self._won -= self._won >> FORGET
        self._lost -= self._lost >> FORGET


ORDERS: dict[str, OrderOf] = {"cost": CostOrder, "lru": EvictionOrder}
"""By the name that the setting `eviction` gives them."""
