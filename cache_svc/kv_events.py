"""What has become findable in the cache and what is so no more, for routers that want to know where a prefix lies.

A `Journal` collects what happens in one index, as its `WatchedIndex` is changed; an index that nobody watches is a
plain `Index` and knows nothing of this. `Feed` has the journals of all indexes: of each executor's device blocks, under
the executor's *rank* (0, 1, .. in the order in which their names were first seen), and of the lower tiers, which have
no rank. It also says at any time what there is, for those who come late.

Applying events in order gives the set of (rank, medium, key) that can be found. Nothing here knows how they travel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cache_svc.epochs import DevicePool
from cache_svc.index import Content, Index, Origin
from jitney.keys import Key, root_key, salt_digest

NO_SALT = salt_digest("")
ROOTS_KEPT = 4096
"""Of salts and model versions: what is forgotten is computed again."""


class Medium(StrEnum):
    """Where a block lies, in the words of vLLM's events."""

    DEVICE = "GPU"
    CPU = "CPU"
    SSD = "STORAGE"


@dataclass(slots=True)
class Stored:
    """Blocks of one chain, one behind the other. `parent` stands before the first, None: it is the first of its chain.

    `token_ids` is int32 little-endian, of all blocks.
    """

    medium: Medium
    keys: list[Key]
    parent: Key | None
    token_ids: bytearray
    origin: Origin


@dataclass(slots=True)
class Removed:
    """Blocks that cannot be found any more."""

    medium: Medium
    keys: list[Key]


@dataclass(slots=True)
class Cleared:
    """Nothing can be found any more, in no medium."""


Event = Stored | Removed | Cleared


class Roots:
    """Which keys are the roots of chains: those of the fingerprints that were seen."""

    def __init__(self) -> None:
        self._fingerprints: dict[bytes, None] = {}
        self.known: dict[tuple[bytes, str], set[Key]] = {}

    def learn(self, fingerprint: bytes) -> None:
        """Chains of this fingerprint may come."""
        if fingerprint not in self._fingerprints:
            self._fingerprints[fingerprint] = None
            self.known.clear()

    def is_root(self, key: Key, origin: Origin) -> bool:
        """Whether a first block of that origin has this parent."""
        named = (origin.salt_digest, origin.model_version)
        known = self.known.get(named)
        if known is None:
            if len(self.known) >= ROOTS_KEPT:
                self.known.clear()
            known = {root_key(*named, "", fingerprint) for fingerprint in self._fingerprints}
            self.known[named] = known
        return key in known


class Journal:
    """Events in the order in which they happened, until they are taken."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self.events: list[Event] = []

    def stored(self, medium: Medium, key: Key, parent: Key, content: Content) -> None:
        """A block can be found; one right behind the last one goes into its event."""
        last = self.events[-1] if self.events else None
        if (
            isinstance(last, Stored)
            and last.keys[-1] == parent
            and last.medium is medium
            and last.origin == content.origin
        ):
            last.keys.append(key)
            last.token_ids += content.token_ids
            return
        before = None if self._roots.is_root(parent, content.origin) else parent
        self.events.append(Stored(medium, [key], before, bytearray(content.token_ids), content.origin))

    def removed(self, medium: Medium, keys: Iterable[Key]) -> None:
        """These cannot be found any more."""
        gone = list(keys)
        if not gone:
            return
        last = self.events[-1] if self.events else None
        if isinstance(last, Removed) and last.medium is medium:
            last.keys += gone
        else:
            self.events.append(Removed(medium, gone))

    def take(self) -> list[Event]:
        """All so far; starts anew."""
        events, self.events = self.events, []
        return events


class WatchedIndex(Index):
    """An index that tells a journal what is entered and what is forgotten."""

    __slots__ = ("journal", "medium")

    def __init__(self, total: int, journal: Journal, medium: Medium) -> None:
        super().__init__(total)
        self.journal = journal
        self.medium = medium

    def add(self, block: int, key: Key, parent_key: Key, content: Content) -> Collection[int]:
        """See Index."""
        self.journal.stored(self.medium, key, parent_key, content)
        return super().add(block, key, parent_key, content)

    def add_run(self, blocks: Sequence[int], keys: Sequence[Key], parent_key: Key, content: Content) -> None:
        """See Index."""
        size = len(content.token_ids) // len(keys)
        for at, (parent, key) in enumerate(zip((parent_key, *keys), keys, strict=False)):
            part = Content(content.token_ids[at * size : (at + 1) * size], content.origin)
            self.journal.stored(self.medium, key, parent, part)
        super().add_run(blocks, keys, parent_key, content)

    def remove(self, blocks: Iterable[int]) -> None:
        """See Index."""
        gone = list(blocks)
        self.journal.removed(self.medium, [key for block in gone if (key := self.key[block]) is not None])
        super().remove(gone)


class Feed:
    """All indexes that are watched, and what happened in them. `rank` None: shared by all executors."""

    def __init__(self) -> None:
        self.roots = Roots()
        self.ranks: dict[str, int] = {}
        self._journals: dict[int | None, Journal] = {}
        self.indexes: dict[tuple[int | None, Medium], WatchedIndex] = {}

    def device(self, pool: DevicePool) -> WatchedIndex:
        """The index of an executor's device pool; what an earlier one of this name had is forgotten."""
        self.roots.learn(pool.fingerprint)
        return self._watch(self.ranks.setdefault(pool.executor, len(self.ranks)), Medium.DEVICE, pool.blocks)

    def tier(self, medium: Medium, total: int) -> WatchedIndex:
        """The index of a lower tier."""
        return self._watch(None, medium, total)

    def _watch(self, rank: int | None, medium: Medium, total: int) -> WatchedIndex:
        journal = self._journals.setdefault(rank, Journal(self.roots))
        old = self.indexes.get((rank, medium))
        if old is not None:
            journal.removed(medium, old.sealed)
            old.journal = Journal(self.roots)  # nobody reads what still happens there
        index = self.indexes[rank, medium] = WatchedIndex(total, journal, medium)
        return index

    def take(self) -> list[tuple[int | None, list[Event]]]:
        """What happened since the last call, by rank; ranks without news are left out."""
        news = ((rank, journal.take()) for rank, journal in self._journals.items() if journal.events)
        return list(news)

    def snapshot(self, blocks: int) -> Iterator[tuple[int | None, list[Event]]]:
        """All that there is at the time of this call, with at most so many blocks in each part."""
        copies = [
            (rank, medium, [(key, index.parent_key[at], index.content_of(at)) for key, at in index.sealed.items()])
            for (rank, medium), index in self.indexes.items()
        ]
        return (
            (rank, self._told(medium, entries[first : first + blocks]))
            for rank, medium, entries in copies
            for first in range(0, len(entries), blocks)
        )

    def _told(self, medium: Medium, entries: Sequence[tuple[Key, Key | None, Content | None]]) -> list[Event]:
        journal = Journal(self.roots)
        for key, parent, content in entries:
            assert parent is not None and content is not None, "a sealed block has both"
            journal.stored(medium, key, parent, content)
        return journal.take()
