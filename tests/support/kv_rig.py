"""Ledgers and tiers that a feed watches, and what their indexes have."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cache_svc.blocks import BlockTable
from cache_svc.epochs import DevicePool
from cache_svc.kv_events import Event, Feed, Medium
from cache_svc.kv_events_wire import encode
from cache_svc.ledger import Ledger
from cache_svc.tiers import TierLimits, Tiers
from tests.support.kv_mirror import Known, Mirror, Where
from tests.support.ledger_rig import BLOCK_TOKENS, Rig
from tests.support.tier_rig import DeviceRig, TierRig


class WatchedRig(Rig):
    """A rig whose ledger is a device of the feed."""

    def __init__(self, feed: Feed, name: str, blocks: int) -> None:
        super().__init__(blocks)
        self.index = feed.device(DevicePool(name, 1, b"", blocks, 1, BLOCK_TOKENS))
        self.ledger = Ledger(BlockTable(blocks, index=self.index), BLOCK_TOKENS)


class WatchedTierRig(TierRig):
    """A rig whose tiers and devices are the feed's."""

    def __init__(self, feed: Feed, limits: TierLimits) -> None:
        super().__init__(limits)
        self.feed = feed
        cpu, ssd = feed.tier(Medium.CPU, limits.cpu_slots), feed.tier(Medium.SSD, limits.ssd_slots)
        self.tiers = Tiers(limits, cpu_index=cpu, ssd_index=ssd)

    def watched(self, blocks: int, name: str) -> DeviceRig:
        """Another executor."""
        device = self.device(blocks, name)
        index = self.feed.device(DevicePool(name, 1, b"", blocks, 1, BLOCK_TOKENS))
        device.ledger = Ledger(BlockTable(blocks, index=index), BLOCK_TOKENS, self.tiers, device.owner, b"")
        return device


def truth(feed: Feed) -> dict[Where, Known]:
    """What the indexes have, in the mirror's words."""
    found: dict[Where, Known] = {}
    for (rank, medium), index in feed.indexes.items():
        known: Known = {}
        for key, at in index.sealed.items():
            content, parent = index.content_of(at), index.parent_key[at]
            assert content is not None and parent is not None
            before = None if feed.roots.is_root(parent, content.origin) else parent
            known[key] = (before, tuple(np.frombuffer(content.token_ids, "<i4").tolist()))
        if known:
            found[rank, medium.value] = known
    return found


def follow(mirror: Mirror, parts: Iterable[tuple[int | None, list[Event]]]) -> None:
    """Has the mirror follow them, over the wire."""
    for rank, events in parts:
        mirror.follow(encode(1.0, events, rank))
