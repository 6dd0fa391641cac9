"""The orders of eviction: leaves first, nothing lost, the same every time; and what the cost-aware one is good for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_svc import cost_order
from cache_svc.cost_order import ORDERS, CostOrder
from cache_svc.eviction import EvictionOrder, OrderOf
from cache_svc.index import NO_BLOCK, Content, Index, Origin
from jitney.block_ops import BlockState
from jitney.keys import Key

SEALED, CACHED = BlockState.SEALED, BlockState.CACHED
ROOT = Key(bytes(32))
CONTENT = Content(b"", Origin("default", b"", ""))
CHAINS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=40)


def key_of(path: Sequence[int]) -> Key:
    """One for each prefix."""
    return Key(hashlib.sha256(repr(list(path)).encode()).digest()) if path else ROOT


@pytest.fixture(autouse=True, scope="module")
def learns_early() -> Iterator[None]:
    """So that small pools learn, and often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_order, "LEAST_BLOCKS", 1)
        patch.setattr(cost_order, "LEAST_LEARNED_FROM", 7)
        yield


class Pool:
    """So many blocks in an order, used one chain after the other."""

    def __init__(self, total: int, order: OrderOf) -> None:
        self.index = Index(total)
        self.state: list[BlockState] = [BlockState.FREE] * total
        self.free = list(range(total))
        self.order = order(self.index, self.state, CACHED)
        self.evicted: list[int] = []

    def use(self, path: Sequence[int], generated_tokens: int = 0) -> int:
        """A request comes, computes what is not there, generates, and goes; how many blocks it found."""
        keys = [key_of(path[: at + 1]) for at in range(len(path))]
        held = self.index.find(keys)
        for block in held:
            self.state[block] = SEALED
            self.order.held(block)
        found = len(held)
        missing = len(keys) - found - len(self.free)
        if missing > 0:
            self.evict(missing)
        for at in range(found, len(keys)):
            block = self.free.pop()
            self.state[block] = SEALED
            adopted = self.index.add(block, keys[at], keys[at - 1] if at else ROOT, CONTENT)
            self.order.sealed(block, adopted)
            held.append(block)
        for block in reversed(held):
            self.state[block] = CACHED
        self.order.rested_all(held[::-1], generated_tokens)
        return found

    def evict(self, count: int) -> None:
        """Leaves first, and as `next` foretold."""
        foretold = self.order.next(count)
        assert foretold == self.order.next(count)
        gone = self.order.pop(count)
        assert gone == foretold and len(set(gone)) == count
        for block in gone:
            assert all(self.index.parent[other] != block for other in self.index.sealed.values())
            self.index.remove([block])
            self.state[block] = BlockState.FREE
        self.free += gone
        self.evicted += gone

    def check(self) -> None:
        """Every cached block can be evicted: none is lost, none is there twice."""
        cached = set(self.index.sealed.values())
        assert set(self.order.order) == cached and len(self.order) == len(cached)
        everything = self.order.next(len(cached) + 1)
        assert sorted(everything) == sorted(cached)
        seen: set[int] = set()
        for block in everything:
            assert all(child in seen for child in cached if self.index.parent[child] == block)
            seen.add(block)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@given(total=st.integers(5, 12), chains=CHAINS)
@settings(max_examples=60, deadline=None)
def test_leaves_go_first_and_no_block_is_lost(order: OrderOf, total: int, chains: list[list[int]]) -> None:
    pool = Pool(total, order)
    for chain in chains:
        pool.use(chain)
        pool.check()


@given(chains=CHAINS, doomed=st.lists(st.integers(0, 1), min_size=1, max_size=3), copied=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_copies_and_invalidations_lose_nothing(chains: list[list[int]], doomed: list[int], copied: int) -> None:
    pool = Pool(8, CostOrder)
    for chain in chains:
        pool.use(chain)
        if pool.state[copied] is CACHED:
            pool.state[copied] = SEALED
            pool.order.lifted(copied)
            assert copied not in pool.order.next(8)
            pool.state[copied] = CACHED
            pool.order.put_back(copied)
        pool.check()
    top = pool.index.sealed.get(key_of(doomed))
    gone = pool.order.pick(set() if top is None else pool.index.behind([top]))
    assert (top is None) == (not gone)
    pool.index.remove(gone)
    pool.check()


@given(chains=CHAINS)
@settings(max_examples=30, deadline=None)
def test_the_same_uses_give_the_same_order(chains: list[list[int]]) -> None:
    pools = [Pool(6, CostOrder), Pool(6, CostOrder)]
    for chain in chains:
        assert pools[0].use(chain) == pools[1].use(chain)
    assert pools[0].evicted == pools[1].evicted


def test_a_copy_does_not_change_a_blocks_place() -> None:
    pool = Pool(4, CostOrder)
    pool.use([1])
    pool.use([2])
    first = pool.order.next(1)[0]
    pool.state[first] = SEALED
    pool.order.lifted(first)
    pool.state[first] = CACHED
    pool.order.put_back(first)
    assert pool.order.next(2)[0] == first


def hits(order: OrderOf, total: int) -> int:
    """Five prompts come again and again, and after each of them four that never do."""
    pool, found = Pool(total, order), 0
    for number in range(1000):
        found += pool.use([number % 5, 1, 1])
        for other in range(4):
            pool.use([1000 + 4 * number + other, 1])
    return found


def test_what_never_comes_back_does_not_drive_out_what_does() -> None:
    """The working set of the five is 15 blocks; between two uses of one come 40 others."""
    assert hits(EvictionOrder, 30) == 0
    assert hits(CostOrder, 30) > 0.8 * 3 * 1000


def test_prompts_with_the_answers_of_those_that_come_back_are_kept() -> None:
    """Prompts of one kind, short or long answers: only those of short ones come back, once, and later than the pool
    holds all."""

    def found(order: OrderOf) -> int:
        pool, hits = Pool(60, order), 0
        for number in range(1000):
            hits += pool.use([number - 10, 1], 5) if number % 5 == 0 else 0
            pool.use([number, 1], 5 if number % 5 == 0 else 500)
            for other in range(2):
                pool.use([-1 - 2 * number - other, 1], 500)
        return hits

    assert found(EvictionOrder) < 30
    assert found(CostOrder) > 200


def test_a_chain_is_evicted_from_its_end() -> None:
    for order in ORDERS.values():
        pool = Pool(4, order)
        pool.use([1, 2, 3, 4])
        parents = [pool.index.parent[block] for block in pool.order.next(4)]
        assert parents == [*pool.order.next(4)[1:], NO_BLOCK]
