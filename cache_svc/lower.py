"""What all executors share below their devices: CPU tier and SSD, swap pins, work of the disk, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cache_svc.disk_work import DiskWork
from cache_svc.eviction import OrderOf
from cache_svc.index import Index
from cache_svc.pins import Swapped, SwapPins
from cache_svc.slots import BUSY, Entry, SlotTable
from cache_svc.tier_usage import Moved
from jitney.errors import InvalidRequest
from jitney.keys import Key


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Sizes and budgets of the lower tiers."""

    cpu_slots: int = 0  # staging slots included
    ssd_slots: int = 0
    staging_slots: int = 0  # of cpu_slots, those for the SSD's sake: with no others nothing stays in the CPU tier
    pin_permille: int = 500  # of a tier's slots that swapped requests may pin
    pin_limit_us: int = 60_000_000
    stores_in_flight: int = 64  # blocks that are ordered and not answered, of one executor
    disk_jobs_in_flight: int = 64  # blocks
    interval_blocks: int = 8  # between the places that the SSD keeps of a long chain
    tenant_permille: int = 1000  # of a lower tier's slots that one tenant may have

    def __post_init__(self) -> None:
        least = {"stores_in_flight": 1, "disk_jobs_in_flight": 1, "interval_blocks": 1}
        most = {"pin_permille": 1000, "tenant_permille": 1000, "staging_slots": self.cpu_slots}
        for name in self.__dataclass_fields__:
            value, limit = getattr(self, name), most.get(name, 1 << 62)
            if not least.get(name, 0) <= value <= limit:
                what = f"{name} is {value}, must be {least.get(name, 0)} to {limit}"
                raise InvalidRequest(what, field=name, limit=limit, value=value)


class Lower:
    """`storing[key]` is the CPU slot that an executor copies the key's block into.

    `arrived(slot, ok)` is told of the CPU slot of each read that has ended, `swap_over` whose pins are gone.
    """

    def __init__(
        self,
        limits: TierLimits,
        order: OrderOf,
        arrived: Callable[[int, bool], None],
        swap_over: Callable[[Swapped], None],
        cpu_index: Index | None = None,
        ssd_index: Index | None = None,
    ) -> None:
        self.limits = limits
        self.now_us = 0
        self.cpu_moved, self.ssd_moved = Moved(), Moved()
        self.unstored = 0
        self.cpu = SlotTable(limits.cpu_slots, limits.tenant_permille, order, self._lost, cpu_index)
        self.ssd = SlotTable(limits.ssd_slots, limits.tenant_permille, order, None, ssd_index)
        self.storing: dict[Key, int] = {}
        self.disk = DiskWork(self.cpu, self.ssd, limits.disk_jobs_in_flight, self.ssd_moved, arrived)
        self.pins = SwapPins(limits.pin_permille, limits.pin_limit_us, swap_over)

    @property
    def has_cpu_tier(self) -> bool:
        """Whether entries stay in the CPU tier; else its slots are there for what goes to the SSD and comes back."""
        return self.cpu.total > self.limits.staging_slots

    @property
    def has_ssd(self) -> bool:
        """Whether there is an SSD, and slots to go through."""
        return self.ssd.total > 0 and self.cpu.total > 0

    def has(self, key: Key | None) -> bool:
        """Whether a lower tier has the key, or will."""
        return (
            key in self.cpu.index.sealed
            or key in self.storing
            or key in self.disk.reading
            or key in self.ssd.index.sealed
        )

    def filled(self, slot: int, checksum: int, *, good: bool) -> None:
        """An executor has copied a block into the slot, and still has to leave it. Not `good`: the copy is void."""
        entry = self.cpu.entry[slot]
        if entry is None:  # retired meanwhile
            return
        del self.storing[entry.key]
        if good and self.cpu.find(entry.key) is None:
            self.cpu_moved.stores += 1
            self.cpu.store(slot, checksum)
            self.disk.stored(entry.key)
            return
        self.cpu.retire(slot)
        if not good:
            self.cpu_moved.dropped += 1
            if self.cpu.find(entry.key) is None and entry.key not in self.disk.reading:
                self.disk.lost(entry.key)

    def bad(self, slot: int) -> None:
        """What a load reads from a slot of the CPU tier is not what it should be: the entry goes with all behind it."""
        self.cpu_moved.bad += 1
        if self.cpu.state[slot] is not BUSY:
            return
        doomed = self.cpu.index.behind((slot,))
        for each in doomed:
            self.disk.lost(self.cpu.entry_of(each).key)
        self.cpu_moved.dropped += len(doomed) - 1
        self.cpu.remove(doomed)

    def _lost(self, entry: Entry) -> None:
        """An entry is evicted from the CPU tier."""
        self.disk.lost(entry.key)
