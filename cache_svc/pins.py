"""What is pinned in the lower tiers for swapped requests: within a budget, and for a limited time.

A request's pins end when it boards or is released, with its epoch, after the time limit, or when the budget is needed
and they are the oldest. Then what was stored stays, like any other entry, until it is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_svc.slots import SlotTable
from jitney.block_ops import RequestId
from jitney.keys import Key

Owner = tuple[str, int]
"""An executor's name and epoch."""
Swapped = tuple[Owner, RequestId]


@dataclass(slots=True)
class Pinned:
    """The keys of one request in one tier, from the start of its chain on."""

    table: SlotTable
    keys: Sequence[Key]
    since_us: int


class SwapPins:
    """`requests` is in the order in which they were swapped. `ended(swapped)` is told of each whose pins are gone."""

    def __init__(self, permille: int, limit_us: int, ended: Callable[[Swapped], None]) -> None:
        self.permille = permille
        self.limit_us = limit_us
        self.ended = ended
        self.requests: dict[Swapped, Pinned] = {}

    def room(self, table: SlotTable) -> int:
        """Keys that can be pinned now."""
        return max(0, table.total * self.permille // 1000 - len(table.pinned))

    def pin(self, swapped: Swapped, table: SlotTable, keys: Sequence[Key], now_us: int) -> int:
        """Pins the first of these keys, as far as the budget allows when the oldest have gone; returns how many."""
        self.end(swapped)
        budget = table.total * self.permille // 1000
        while len(table.pinned) + sum(key not in table.pinned for key in keys) > budget:
            oldest = next((who for who, pinned in self.requests.items() if pinned.table is table), None)
            if oldest is None:
                break
            self.end(oldest)
        room, count = self.room(table), 0
        for key in keys:
            room -= key not in table.pinned
            if room < 0:
                break
            table.pin(key)
            count += 1
        if count:
            self.requests[swapped] = Pinned(table, keys[:count], now_us)
        return count

    def shorten(self, swapped: Swapped, count: int) -> None:
        """Only the first `count` keys stay pinned."""
        pinned = self.requests[swapped]
        for key in reversed(pinned.keys[count:]):
            pinned.table.unpin(key)
        pinned.keys = pinned.keys[:count]
        if not count:
            del self.requests[swapped]

    def end(self, swapped: Swapped) -> bool:
        """The request needs its pins no more; whether it had any."""
        pinned = self.requests.pop(swapped, None)
        if pinned is None:
            return False
        for key in reversed(pinned.keys):
            pinned.table.unpin(key)
        self.ended(swapped)
        return True

    def end_all(self, owner: Owner) -> None:
        """Those of an epoch that is over."""
        for swapped in [swapped for swapped in self.requests if swapped[0] == owner]:
            self.end(swapped)

    def expire(self, now_us: int) -> None:
        """Ends what has been pinned too long."""
        while self.requests:
            oldest = next(iter(self.requests))
            if now_us - self.requests[oldest].since_us <= self.limit_us:
                return
            self.end(oldest)
