"""Stores of one executor: which blocks it shall copy into the CPU tier, in what order, and what comes of it.

Three things make an order, the first before the others:

1. A swap to the SSD that waits for CPU slots (a swap to the CPU tier gets all of its slots at once).
2. What the SSD shall keep and the CPU tier does not have.
3. Demotion: few device blocks are free, and those that are evicted next have no copy below.

The blocks of a swap are pinned on the device until they are stored: somebody waits for them. They go in small orders,
those at the end of the chain first, since a block comes free when none behind it is held. What a swap finds under way
in an order of another kind makes that one urgent too; the executor is told again.

Other blocks are not pinned: they may be evicted, and filled anew, while they are copied, so that a copy never keeps
blocks from those who need them. A copy whose block has another handle when the executor answers is void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from cache_svc.blocks import ID_MASK, BlockTable
from cache_svc.demotion import Demotion
from cache_svc.index import NO_BLOCK
from cache_svc.lower import Lower
from cache_svc.slots import Entry
from cache_svc.tickets import Store, Tickets, handles
from jitney.errors import InvalidRequest
from jitney.keys import Key
from jitney.ticket_ops import StoreOrder

ORDER_BLOCKS = 16
"""Of one order at most."""
URGENT_BLOCKS = 4
"""Of an urgent one: its blocks come free together, and somebody waits for the first of them."""
WANTED_PER_FLIGHT = 32
"""So many times as many blocks may wait to be ordered as may be in flight."""


class Stores:
    """`filling[slot]` is the open order that a CPU slot belongs to, of any executor, and its index in it."""

    def __init__(
        self,
        lower: Lower,
        filling: dict[int, tuple[Stores, Store, int]],
        table: BlockTable,
        tickets: Tickets,
        fingerprint: bytes,
    ) -> None:
        self.lower = lower
        self.filling = filling
        self.table = table
        self.tickets = tickets
        self.fingerprint = fingerprint
        self.demotion = Demotion(lower, table)
        self.in_flight = 0
        self.waiting: deque[tuple[int, Key]] = deque()  # device blocks, pinned, that a swap wants on the SSD
        self.wanted: deque[tuple[int, Key]] = deque()

    def entry(self, block: int) -> Entry:
        """What a sealed device block holds."""
        index = self.table.index
        key, parent, content = index.key[block], index.parent_key[block], index.content_of(block)
        assert key is not None and parent is not None and content is not None
        return Entry(key, parent, content, self.fingerprint)

    def take(self, block: int, spare: Collection[Key | None] = ()) -> int | None:
        """A CPU slot that the device block's copy shall fill; None if there is none but those of keys to `spare`."""
        entry = self.entry(block)
        slot = self.lower.cpu.take(entry, spare)
        if slot is not None:
            self.lower.storing[entry.key] = slot
        return slot

    def order(self, blocks: Sequence[int], slots: Sequence[int], *, urgent: bool) -> None:
        """Has the executor copy device blocks into slots that were taken for them. Urgent ones are pinned already."""
        most = URGENT_BLOCKS if urgent else ORDER_BLOCKS
        for at in range(0, len(blocks), most):
            chunk = [self.table.handle[block] for block in blocks[at : at + most]]
            chosen = list(slots[at : at + most])
            store = Store(self.tickets.number(), chunk, chosen, [urgent] * len(chunk), urgent)
            self.tickets.open[store.ticket] = store
            for index, slot in enumerate(chosen):
                self.filling[slot] = (self, store, index)
            self.in_flight += len(chunk)
            self.tickets.events.append(self.again(store))

    def again(self, store: Store) -> StoreOrder:
        """The order as the executor is told of it."""
        slots = handles(store.slots, self.lower.cpu.generation)
        return StoreOrder(store.ticket, store.blocks, slots, store.urgent)

    def under_way(self, key: Key) -> int | None:
        """The CPU slot that the key is copied into. A copy whose block was evicted meanwhile is void: given up."""
        slot = self.lower.storing.get(key)
        if slot is not None:
            stores, store, at = self.filling[slot]
            source = store.blocks[at]
            if stores.table.handle[source & ID_MASK] != source:
                self.lower.filled(slot, 0, good=False)
                slot = None
        return slot

    def hold(self, block: int, slot: int) -> bool:
        """Somebody waits for a copy that is under way already: pins its block. False if another executor makes it."""
        stores, store, at = self.filling[slot]
        if stores is not self:
            return False
        if not store.pinned[at]:
            store.pinned[at] = True
            self.table.pin((block,))
        if not store.urgent:
            store.urgent = True
            self.tickets.events.append(self.again(store))
        return True

    def done(self, store: Store, checksums: Sequence[int]) -> None:
        """The executor has made the copies. InvalidRequest if it does not give one checksum a block."""
        if len(checksums) != len(store.blocks):
            raise InvalidRequest(
                f"ticket {store.ticket} has {len(store.blocks)} blocks, {len(checksums)} checksums came",
                field="checksums",
                limit=len(store.blocks),
                value=len(checksums),
            )
        self._end(store, checksums)

    def abort(self, store: Store) -> None:
        """The executor has not made the copies, and will not."""
        self._end(store, None)

    def _end(self, store: Store, checksums: Sequence[int] | None) -> None:
        handle = self.table.handle
        for at, (block, slot) in enumerate(zip(store.blocks, store.slots, strict=True)):
            good = checksums is not None and handle[block & ID_MASK] == block
            self.lower.filled(slot, checksums[at] if checksums is not None else 0, good=good)
        for slot in reversed(store.slots):
            del self.filling[slot]
            self.lower.cpu.leave(slot)
        for block, pinned in zip(reversed(store.blocks), reversed(store.pinned), strict=True):
            if pinned:
                self.table.unpin((block & ID_MASK,))
        self.in_flight -= len(store.blocks)
        del self.tickets.open[store.ticket]

    def void(self, store: Store) -> None:
        """The epoch is over: what its executor still writes into the slots is of no use, but nobody gets them yet."""
        for slot in store.slots:
            entry = self.lower.cpu.entry[slot]
            if entry is not None:
                self.lower.filled(slot, 0, good=False)

    def keep(self, block: int) -> None:
        """The SSD shall have the chain up to this sealed block: a hit may end there. Nothing is noted while too much
        waits already: a later place has it in its chain."""
        lower, index = self.lower, self.table.index
        if len(self.wanted) >= WANTED_PER_FLIGHT * lower.limits.stores_in_flight:
            return
        disk = lower.disk
        key = index.key[block]
        assert key is not None
        path: list[tuple[int, Key]] = []
        at = block
        while at >= 0 and (each := index.key[at]) is not None and not disk.has(each) and each not in disk.kept:
            path.append((at, each))
            at = index.parent[at]
        if at < 0 and path:
            self._keep_above(index.parent_key[path[-1][0]])
        for each_block, each in reversed(path):
            disk.keep(each, place=each == key)
            if each not in lower.cpu.index.sealed:
                self.wanted.append((each_block, each))
        if not path:
            disk.keep(key, place=True)

    def _keep_above(self, key: Key | None) -> None:
        """The device's chain begins behind a block that only the CPU tier has."""
        lower, path = self.lower, []
        index = lower.cpu.index
        slot = NO_BLOCK if key is None else index.sealed.get(key, NO_BLOCK)
        while slot != NO_BLOCK and (each := index.key[slot]) is not None:
            if lower.disk.has(each) or each in lower.disk.kept:
                break
            path.append(each)
            slot = index.parent[slot]
        for each in reversed(path):
            lower.disk.keep(each, place=False)

    def drop_waiting(self, gone: Callable[[Key], bool]) -> None:
        """Swaps that nobody waits for any more: their blocks are let go."""
        stay: deque[tuple[int, Key]] = deque()
        for block, key in self.waiting:
            if gone(key):
                self.lower.disk.give_up(key)
                self.table.unpin((block,))
            else:
                stay.append((block, key))
        self.waiting = stay

    def drop_wanted(self) -> None:
        """What the SSD shall have does not come from this device any more."""
        for _, key in self.wanted:
            if not self.lower.has(key):
                self.lower.disk.lost(key)
        self.wanted.clear()

    def pump(self) -> None:
        """Orders what waits for room, as far as there is some."""
        if self.waiting:
            self._order_waiting()
        if self.wanted:
            self._order_wanted()

    def tend(self) -> None:
        """Orders what waits for room, then what is about to be evicted."""
        self.pump()
        if self.lower.has_cpu_tier:
            self._demote()

    def _order_waiting(self) -> None:
        cpu, storing = self.lower.cpu, self.lower.storing
        blocks: list[int] = []
        slots: list[int] = []
        while self.waiting and cpu.available:
            block, key = self.waiting.popleft()
            slot = None
            if key not in self.lower.disk.reserved or key in storing or key in self.lower.disk.reading:
                pass  # it was invalidated, or somebody else has brought it, or does
            elif (slot := self.take(block)) is None:
                self.lower.disk.lost(key)
            if slot is None:
                self.table.unpin((block,))
            else:
                blocks.append(block)
                slots.append(slot)
        self.order(blocks, slots, urgent=True)

    def _order_wanted(self) -> None:
        """What waits to be written takes no more than half of the CPU slots."""
        lower, index = self.lower, self.table.index
        disk, cpu = lower.disk, lower.cpu
        room = max(1, cpu.total // 2) - len(disk.queue) - len(disk.writing)
        room = min(room, lower.limits.stores_in_flight) - self.in_flight
        blocks: list[int] = []
        slots: list[int] = []
        while self.wanted and len(blocks) < room and cpu.available:
            block, key = self.wanted.popleft()
            if key not in disk.kept or key in cpu.index.sealed or key in lower.storing or key in disk.reading:
                continue
            slot = self.take(block) if index.key[block] == key else None
            if slot is None:  # evicted meanwhile, or its tenant may have no more
                disk.lost(key)
            else:
                blocks.append(block)
                slots.append(slot)
        self.order(blocks, slots, urgent=False)

    def _demote(self) -> None:
        """What is evicted next."""
        room = min(self.lower.limits.stores_in_flight - self.in_flight, self.lower.cpu.available)
        found = self.demotion.next(room) if room > 0 else ()
        blocks: list[int] = []
        slots: list[int] = []
        for block in found:
            slot = self.take(block, self.demotion.spare)
            if slot is not None:
                blocks.append(block)
                slots.append(slot)
        self.order(blocks, slots, urgent=False)
