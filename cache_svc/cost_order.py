"""The cost-aware order of eviction: leaves first, the one that is least worth keeping before all others.

What a block is worth is the cost of computing it again, which grows with its depth, times the hits that it is expected
to earn per time (`cache_svc.reuse`), by the class of its uses so far and its age. Leaves wait in one heap a class, the
longest unused on top. As values never rise with the age, the next victim is one of the tops; when it goes and leaves
its parent a leaf, the parent goes too as long as no other top is worth less, so that a chain goes in one sweep.

**Classes.** How often a block was used. Whether the request that used it last added new blocks behind it. For blocks
that were used once: how many were new at the same time, and whether they went on from a chain that was there.

**Memory.** Uses of evicted blocks are remembered by key, for twice as many as there are blocks. One block of 2^n, by
its key, is *watched*: its ages at reuse feed the profile, past its eviction too, for an order that learns only from
what it kept would never learn that it evicts the wrong ones.

**The guard.** Of all watched blocks, held and evicted, LRU would hold the youngest and this order those of the highest
value, as many as there is room for. Each time a watched block is used, it counts for the one that would have held it,
whichever is in force. While LRU would have had more hits of late, the order is that of LRU.

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
from jitney.keys import KEY_BYTES, Key

NEVER = -1
SIZES = 8
"""Classes of how many blocks were new at once: by doubling, the last from 64 on."""
USED_AGAIN = 2 * 2 * SIZES
CLASSES = USED_AGAIN + 2 * 3
MOST_WATCHED = 1 << 14
WATCHED_PER_BLOCK = 4
REMEMBERED_PER_BLOCK = 2
MOST_REMEMBERED = 1 << 18
LEAST_LEARNED_FROM = 1000
"""Blocks sealed between one learning and the next, or a quarter of all."""
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
        "_balance",
        "_before",
        "_clock",
        "_heaps",
        "_profile",
        "_pushed",
        "_remembered",
        "_sealed",
        "_threshold",
        "_trusted",
        "_watch_mask",
        "_watched",
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
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in range(CLASSES)]
        self._pushed = 0
        self._profile = ReuseProfile(CLASSES)
        self._remembered: OrderedDict[Key, int] = OrderedDict()
        self._watched: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        self._watch_mask = (1 << max(0, WATCHED_PER_BLOCK * total // MOST_WATCHED).bit_length()) - 1
        self._sealed = 0
        self._youth = 0  # LRU would hold what is as young as this
        self._threshold = (0.0, 0)  # and this order what has such a value, and at that one such an age (negated)
        self._balance = 0  # hits of this order less those of LRU
        self._trusted = True

    def sealed(self, block: int, adopted: Collection[int]) -> None:
        super().sealed(block, adopted)
        self.kids[block] = len(adopted)
        self._enter(block, self.parent[block])

    def sealed_run(self, blocks: Sequence[int]) -> None:
        super().sealed_run(blocks)
        kids, depths, starts, last, uses, watch = self.kids, self.depth, self.start, self.last, self.uses, self.watch
        keys: list[Key] = [key for block in blocks if (key := self.key[block]) is not None]
        watched = ((np.frombuffer(b"".join(keys), "<u4")[:: KEY_BYTES // 4] & self._watch_mask) == 0).tolist()
        parent, remembered = blocks[0], self._remembered
        kids[parent] = 0
        self._enter(parent, self.parent[parent])
        start, depth = starts[parent], depths[parent]
        for block, key, looked_at in zip(blocks[1:], keys[1:], watched[1:], strict=True):
            kids[parent] = 1
            kids[block] = 0
            depths[block] = depth = depth + 1
            starts[block] = start
            last[block] = NEVER
            uses[block] = remembered.pop(key) if key in remembered else 0
            watch[block] = looked_at
            if looked_at and key in self._watched:
                self._used_again(key)
            parent = block
        self.length[start] = depth - depths[start] + 1
        self._count(len(blocks) - 1)

    def _enter(self, block: int, parent: int) -> None:
        key = self.key[block]
        assert key is not None
        last, depth, start = self.last, 0, block
        if parent != NO_BLOCK:
            self.kids[parent] += 1
            depth = self.depth[parent] + 1
            if last[parent] == NEVER:
                start = self.start[parent]
        last[block] = NEVER
        self.uses[block] = self._remembered.pop(key, 0)
        self.depth[block] = depth
        self.start[block] = start
        self.length[start] = depth - self.depth[start] + 1
        self.watch[block] = watch = not int.from_bytes(key[:4], "little") & self._watch_mask
        if watch and key in self._watched:
            self._used_again(key)
        self._count(1)

    def _count(self, sealed: int) -> None:
        """So many more were sealed: now and then it learns."""
        self._sealed += sealed
        if self._sealed >= max(LEAST_LEARNED_FROM, len(self.parent) // 4):
            self._learn()

    def held(self, block: int) -> None:
        if self.watch[block]:
            key = self.key[block]
            if key in self._watched:
                self._used_again(key)
        super().held(block)

    def rested(self, block: int) -> None:
        self._clock = now = self._clock + 1
        if block != self._before:
            self._adds = False
        self._before = self.parent[block]
        uses = self.uses[block]
        if self.last[block] == NEVER:
            self._adds = True
        if uses:
            kind = USED_AGAIN + 3 * self._adds + (uses - 1 if uses < 3 else 2)
        else:
            start = self.start[block]
            size = self.length[start].bit_length() - 1
            kind = 2 * (size if size < SIZES else SIZES - 1) + (self.depth[start] > 1)
        self.uses[block] = uses + 1
        self.last[block] = now
        self.kind[block] = kind
        if self.watch[block]:
            self._look(block, kind, now)
        super().rested(block)
        if not self.kids[block] and block in self.order:
            self._push(block)

    def lifted(self, block: int) -> None:
        super().held(block)

    def put_back(self, block: int) -> None:
        if self.last[block] == NEVER:
            self.rested(block)
            return
        super().rested(block)
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
        heappush(self._heaps[self.kind[block]], (self.last[block], block))
        self._pushed += 1
        if self._pushed > 2 * len(self.parent) + 64:
            self._pushed = 0
            for heap in self._heaps:
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
            for heap in heaps:
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
        self._watched[key] = (kind, now)
        self._watched.move_to_end(key)
        if len(self._watched) > WATCHED_PER_BLOCK * len(self.parent) // (self._watch_mask + 1) + 64:
            _, (kind, last) = self._watched.popitem(last=False)
            self._profile.gone(kind, now - last)

    def _used_again(self, key: Key | None) -> None:
        """A watched block was used again, or computed again after it had been evicted."""
        assert key is not None
        kind, last = self._watched.pop(key)
        age = self._clock - last
        self._profile.used(kind, age)
        if self._profile.values:
            value = self._profile.values[kind][age_bucket(age)]
            self._balance += ((value, -age) >= self._threshold) - (age <= self._youth)

    def _learn(self) -> None:
        self._sealed = 0
        if not self._watched:
            return
        watched = np.array(list(self._watched.values()), np.int64)
        ages = self._clock - watched[:, 1]
        values = self._profile.learn(watched[:, 0], ages)
        room = min(len(self.order) // (self._watch_mask + 1), len(ages) - 1)
        self._youth = int(ages[len(ages) - 1 - room])  # they stand in the order of their last use
        last_in = int(np.lexsort((ages, -values))[room])
        self._threshold = (float(values[last_in]), -int(ages[last_in]))
        self._trusted = self._balance >= 0
        self._balance -= self._balance >> 3


ORDERS: dict[str, OrderOf] = {"cost": CostOrder, "lru": EvictionOrder}
"""By the name that the setting `eviction` gives them."""
