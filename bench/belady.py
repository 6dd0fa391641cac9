"""The best that any order of eviction could do: Belady's, over blocks that go only after all that stand behind them.

Whoever is used last of all goes first. A use of a block is a use of all before it, so that a parent is never used later
than its child, and the rule agrees with leaves first.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


def belady_hits(chains: Sequence[Sequence[int]], blocks: int) -> int:
    """Hits, in blocks, of a pool of so many, empty at first. A chain longer than the pool is cut to its length."""
    never = len(chains)
    parent: dict[int, int] = {}
    next_uses = _next_uses(chains)
    next_use: dict[int, int] = {}  # of cached blocks
    kids: dict[int, int] = {}
    leaves: list[tuple[int, int, int]] = []  # (-next use, -depth, block)
    depth: dict[int, int] = {}
    hits = 0
    for now, chain in enumerate(chains):
        chain = chain[:blocks]
        found = 0
        while found < len(chain) and chain[found] in next_use:
            found += 1
        hits += found
        for at, block in enumerate(chain):
            parent[block] = chain[at - 1] if at else -1
            depth[block] = at
        held = set(chain[:found])
        room = blocks - len(next_use) - (len(chain) - found)
        while room < 0:
            use, _, block = heappop(leaves)
            if next_use.get(block) != -use or kids.get(block) or block in held:
                continue
            del next_use[block]
            room += 1
            before = parent[block]
            if before >= 0:
                kids[before] -= 1
                if not kids[before] and before not in held:
                    heappush(leaves, (-next_use[before], -depth[before], before))
        for block in chain[found:]:
            kids[block] = 0
            if parent[block] >= 0:
                kids[parent[block]] += 1
        for block, use in zip(chain, next_uses[now], strict=False):
            next_use[block] = min(use, never)
        if chain and not kids[chain[-1]]:
            heappush(leaves, (-next_use[chain[-1]], -depth[chain[-1]], chain[-1]))
    return hits


def _next_uses(chains: Sequence[Sequence[int]]) -> list[list[int]]:
    """[request][block]: the number of the next request that has the block, the number of requests if none has."""
    later: dict[int, int] = {}
    uses: list[list[int]] = []
    for now in range(len(chains) - 1, -1, -1):
        uses.append([later.get(block, len(chains)) for block in chains[now]])
        later.update(dict.fromkeys(chains[now], now))
    return uses[::-1]
