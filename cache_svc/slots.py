"""The table of one lower tier's slots: every move between states is a method here, and nowhere else.

    FREE --take--> FILLING --store--> BUSY <--use / leave, pin / unpin--> RESTING --evict--> FREE
                      \\--retire--> RETIRED --last leave--> FREE
    BUSY, RESTING --remove--> RETIRED if it is used, else FREE

FILLING: a copy into the slot is under way. BUSY and RESTING slots are *stored*: they are in the index, and a RESTING
one, which nobody reads and no swapped request pins, may be evicted once all that stand behind it may be. RETIRED: it
holds nothing that can be found, and who copies into it or out of it has not let go: nobody gets the slot until then.

Invariants: a slot is in one state; `users[s]` is the number of copies that touch s (the one that fills it included),
zero exactly for FREE, RESTING and for BUSY slots whose key is pinned; a key is stored in one slot; a slot has another
generation whenever it was given away anew. Pins belong to keys, not to slots: what is stored under a pinned key stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum

from cache_svc.eviction import OrderOf
from cache_svc.index import Content, Index
from jitney.keys import Key
from jitney.ticket_ops import Slot

EVICTED_AT_ONCE = 64
"""Of a tenant that has all the slots it may have: finding them goes through the whole order."""


class SlotState(IntEnum):
    """What a slot is good for."""

    FREE = 1
    FILLING = 2
    BUSY = 3
    RESTING = 4
    RETIRED = 5


FREE, FILLING, BUSY = SlotState.FREE, SlotState.FILLING, SlotState.BUSY
RESTING, RETIRED = SlotState.RESTING, SlotState.RETIRED


@dataclass(frozen=True, slots=True)
class Entry:
    """What a slot holds."""

    key: Key
    parent: Key
    content: Content
    fingerprint: bytes

    @property
    def tenant(self) -> str:
        """Who is charged for it."""
        return self.content.origin.tenant


class SlotTable:
    """`total` slots, indexed by number. `lost(entry)` is told of every entry that is evicted, before its slot is."""

    __slots__ = (
        "checksum",
        "entry",
        "evicted",
        "free",
        "generation",
        "given",
        "index",
        "lost",
        "order",
        "pinned",
        "place",
        "retired",
        "state",
        "tenant_most",
        "tenants",
        "total",
        "users",
    )

    def __init__(
        self,
        total: int,
        tenant_permille: int,
        order: OrderOf,
        lost: Callable[[Entry], None] | None = None,
        index: Index | None = None,
    ) -> None:
        self.total = total
        self.tenant_most = max(1, total * tenant_permille // 1000)
        self.lost = lost
        self.state: list[SlotState] = [FREE] * total
        self.users: list[int] = [0] * total
        self.generation: list[int] = [0] * total
        self.checksum: list[int] = [0] * total
        self.place: list[bool] = [False] * total
        self.entry: list[Entry | None] = [None] * total
        self.index = index or Index(total)
        self.order = order(self.index, self.state, RESTING)
        self.free: dict[int, None] = dict.fromkeys(range(total - 1, -1, -1))
        self.pinned: dict[Key, int] = {}
        self.tenants: dict[str, int] = {}
        self.given: list[int] = []
        self.retired = 0
        self.evicted = 0

    @property
    def available(self) -> int:
        """Slots that can be had now."""
        return len(self.free) + len(self.order)

    @property
    def used(self) -> int:
        """Slots with content, on its way or there."""
        return self.total - len(self.free) - self.retired

    def handle(self, slot: int) -> Slot:
        """The slot in its generation."""
        return Slot(self.generation[slot] << 32 | slot)

    def find(self, key: Key) -> int | None:
        """The slot that the key is stored in."""
        return self.index.sealed.get(key)

    def entry_of(self, slot: int) -> Entry:
        """What a slot that is neither FREE nor RETIRED holds."""
        entry = self.entry[slot]
        assert entry is not None
        return entry

    def take(self, entry: Entry, spare: Collection[Key | None] = ()) -> int | None:
        """FREE -> FILLING, for one copy; evicts if it must, but none of the keys to `spare`.

        None if there is none, or the tenant may have no more.
        """
        tenant = entry.tenant
        if self.tenants.get(tenant, 0) >= self.tenant_most:
            self._evict(self._oldest_of(tenant, spare))
            if self.tenants.get(tenant, 0) >= self.tenant_most:
                return None
        if not self.free:
            if not len(self.order) or (spare and self.entry_of(self.order.next(1)[0]).key in spare):
                return None
            self._evict(self.order.pop(1))
        slot, _ = self.free.popitem()
        self._fill(slot, entry)
        return slot

    def take_this(self, slot: int, entry: Entry) -> bool:
        """FREE -> FILLING for this very slot; whether it was free, and the tenant may have it."""
        if self.state[slot] is not FREE or self.tenants.get(entry.tenant, 0) >= self.tenant_most:
            return False
        del self.free[slot]
        self._fill(slot, entry)
        return True

    def _fill(self, slot: int, entry: Entry) -> None:
        self.state[slot] = FILLING
        self.users[slot] = 1
        self.entry[slot] = entry
        self.place[slot] = False
        self.generation[slot] += 1
        self.given.append(slot)
        self.tenants[entry.tenant] = self.tenants.get(entry.tenant, 0) + 1

    def store(self, slot: int, checksum: int) -> None:
        """FILLING -> BUSY, under a key that no other slot has. Who filled it still has to leave."""
        entry = self.entry_of(slot)
        self.state[slot] = BUSY
        self.checksum[slot] = checksum
        self.order.sealed(slot, self.index.add(slot, entry.key, entry.parent, entry.content))

    def use(self, slot: int) -> None:
        """One more copy touches it: RESTING -> BUSY."""
        self.users[slot] += 1
        self._wake(slot)

    def leave(self, slot: int) -> None:
        """A copy has ended: without any, BUSY -> RESTING unless it is pinned, RETIRED -> FREE."""
        self.users[slot] -= 1
        if self.users[slot]:
            return
        if self.state[slot] is RETIRED:
            self.retired -= 1
            self._free(slot)
        elif self.entry_of(slot).key not in self.pinned:
            self._rest(slot)

    def pin(self, key: Key) -> None:
        """What is or will be stored under the key stays."""
        pins = self.pinned.get(key, 0)
        self.pinned[key] = pins + 1
        slot = self.find(key)
        if not pins and slot is not None:
            self._wake(slot)

    def unpin(self, key: Key) -> None:
        """One pin less."""
        if self.pinned[key] > 1:
            self.pinned[key] -= 1
            return
        del self.pinned[key]
        slot = self.find(key)
        if slot is not None and not self.users[slot]:
            self._rest(slot)

    def retire(self, slot: int) -> None:
        """FILLING -> RETIRED: what comes is of no use."""
        self.state[slot] = RETIRED
        self.retired += 1
        self._discharge(slot)

    def remove(self, doomed: set[int]) -> list[int]:
        """Forgets stored slots, in which all that stand behind one must be; returns them."""
        for slot in doomed:
            if self.state[slot] is BUSY:
                self._rest(slot)
        gone = self.order.pick(doomed)
        self.index.remove(gone)
        for slot in gone:
            self._discharge(slot)
            if self.users[slot]:
                self.state[slot] = RETIRED
                self.retired += 1
            else:
                self._free(slot)
        return gone

    def _wake(self, slot: int) -> None:
        if self.state[slot] is RESTING:
            self.state[slot] = BUSY
            self.order.held(slot)

    def _rest(self, slot: int) -> None:
        self.state[slot] = RESTING
        self.order.rested(slot)

    def _oldest_of(self, tenant: str, spare: Collection[Key | None]) -> list[int]:
        """The first slots of a tenant that can be evicted without those of others, taken from the order."""
        wanted = max(1, min(EVICTED_AT_ONCE, self.tenant_most // 8))
        chosen: set[int] = set()
        staying: set[int] = set()  # slots with somebody else's behind them
        parent = self.index.parent
        for slot in self.order.next(len(self.order)):
            entry = self.entry_of(slot)
            if entry.tenant == tenant and slot not in staying and entry.key not in spare:
                chosen.add(slot)
                if len(chosen) == wanted:
                    break
            else:
                staying.add(parent[slot])
        return self.order.pick(chosen) if chosen else []

    def _evict(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self.lost is not None:
                self.lost(self.entry_of(slot))
            self.index.remove((slot,))
            self._discharge(slot)
            self._free(slot)
            self.evicted += 1

    def _discharge(self, slot: int) -> None:
        tenant = self.entry_of(slot).tenant
        self.entry[slot] = None
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    def _free(self, slot: int) -> None:
        self.state[slot] = FREE
        self.free[slot] = None
