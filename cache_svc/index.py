"""Which sealed block holds which key, and which block stands before it.

A chain is found by walking its keys from the first one on. A block whose parent is not sealed is an *orphan*: the
first of its chain (its parent is a root), or one whose parent was never sealed. When the parent is sealed later,
orphans become its children, so that the tree of blocks always follows the tree of keys. Digests have no circles; if
false keys have one, the block that would close it has no parent.

Invariants: `sealed[key[b]] == b` for every block b that is sealed or cached; `parent[b]` is the block sealed under
`parent_key[b]`, or NO_BLOCK, and then b is in `orphans[parent_key[b]]`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jitney.keys import Key

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose content it is: what an invalidation may name."""

    tenant: str
    salt_digest: bytes
    model_version: str


@dataclass(frozen=True, slots=True)
class Content:
    """What stands in a sealed block: int32 little-endian token ids, and whose they are."""

    token_ids: bytes
    origin: Origin


class Index:
    """Key to block, and the tree of blocks.

    Lists are indexed by block id. For a block without a `key` the other lists mean nothing. Token ids and origin stand
    in lists of their own: an object a block would cost as much as all the rest, and the collector time.
    """

    __slots__ = ("key", "origin", "orphans", "parent", "parent_key", "sealed", "token_ids")

    def __init__(self, total: int) -> None:
        self.sealed: dict[Key, int] = {}
        self.key: list[Key | None] = [None] * total
        self.parent: list[int] = [NO_BLOCK] * total
        self.parent_key: list[Key | None] = [None] * total
        self.token_ids: list[bytes | None] = [None] * total
        self.origin: list[Origin | None] = [None] * total
        self.orphans: dict[Key, dict[int, None]] = {}

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The sealed blocks of the chain, from its start to the first key that is not sealed."""
        get = self.sealed.get
        found: list[int] = []
        for key in keys:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block: int, key: Key, parent_key: Key, content: Content) -> Collection[int]:
        """Enters a block under a key that is not sealed; returns the orphans that became its children."""
        parent = self.sealed.get(parent_key, NO_BLOCK)
        adopted: Collection[int] = self.orphans.pop(key, ())
        if adopted and self._top(parent) in adopted:
            parent = NO_BLOCK
        self.sealed[key] = block
        self.key[block] = key
        self.token_ids[block] = content.token_ids
        self.origin[block] = content.origin
        self.parent_key[block] = parent_key
        self.parent[block] = parent
        if parent == NO_BLOCK:
            self.orphans.setdefault(parent_key, {})[block] = None
        for child in adopted:
            self.parent[child] = block
        return adopted

    def _top(self, block: int) -> int:
        """The first block of the chain that ends with this one."""
        while block != NO_BLOCK and (before := self.parent[block]) != NO_BLOCK:
            block = before
        return block

    def add_run(self, blocks: Sequence[int], keys: Sequence[Key], parent_key: Key, content: Content) -> None:
        """Enters consecutive blocks of a chain with the content of all; no key is sealed, and none has orphans."""
        ids, origin = content.token_ids, content.origin
        size = len(ids) // len(blocks)
        self.sealed.update(zip(keys, blocks, strict=True))
        key_of, ids_of, origin_of = self.key, self.token_ids, self.origin
        parent_key_of, parent_of = self.parent_key, self.parent
        parent = self.sealed.get(parent_key, NO_BLOCK)
        if parent == NO_BLOCK:
            self.orphans.setdefault(parent_key, {})[blocks[0]] = None
        at = 0
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            ids_of[block] = ids[at : at + size]
            origin_of[block] = origin
            parent_key_of[block] = parent_key
            parent_of[block] = parent
            parent, parent_key = block, key
            at += size

    def remove(self, blocks: Iterable[int]) -> None:
        """Forgets blocks that have no children, or whose children are removed before them."""
        sealed, key, parent = self.sealed, self.key, self.parent
        for block in blocks:
            del sealed[key[block]]  # type: ignore[arg-type]  # A block in the index has a key.
            key[block] = None
            if parent[block] == NO_BLOCK:
                self._leave_orphans(block)

    def _leave_orphans(self, block: int) -> None:
        parent_key = self.parent_key[block]
        assert parent_key is not None
        orphans = self.orphans[parent_key]
        del orphans[block]
        if not orphans:
            del self.orphans[parent_key]

    def behind(self, tops: Iterable[int]) -> set[int]:
        """These blocks and all that stand behind them."""
        children: dict[int, list[int]] = {}
        for block in self.sealed.values():
            children.setdefault(self.parent[block], []).append(block)
        found: set[int] = set()
        wave = list(tops)
        while wave:
            block = wave.pop()
            if block not in found:
                found.add(block)
                wave += children.get(block, ())
        return found

    def entries(self) -> Iterator[tuple[Key, Key, Origin]]:
        """Key, parent key and origin of all blocks."""
        for key, block in self.sealed.items():
            parent_key, origin = self.parent_key[block], self.origin[block]
            if parent_key is not None and origin is not None:
                yield key, parent_key, origin

    def content_of(self, block: int) -> Content | None:
        """What a sealed block holds."""
        ids, origin = self.token_ids[block], self.origin[block]
        return None if ids is None or origin is None else Content(ids, origin)
