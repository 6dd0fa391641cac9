"""The rules of the lower tiers once more, as plainly as they can be said: which keys are stored where, and why.

What is stored, and what a look-up, a load and a swap come to, is foretold. Which entries are evicted is seen later,
and has to be lawful: nothing that is pinned goes, nor anything that others in the tier stand behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache_svc.slots import SlotTable
from cache_svc.tiers import TierLimits, Tiers
from jitney.block_ops import ChainHits, ReserveResult, ResultCode, SwapResult, Tier
from jitney.keys import Key

Who = tuple[str, int, int]
"""Executor, epoch, request."""


class NaiveTiers:
    """`cpu` and `ssd`: key to slot, of what is stored; `cpu_filling`, `ssd_filling`: slot to key, of what will be."""

    def __init__(self, limits: TierLimits) -> None:
        self.limits = limits
        self.cpu: dict[Key, int] = {}
        self.ssd: dict[Key, int] = {}
        self.cpu_filling: dict[int, Key] = {}
        self.ssd_filling: dict[int, Key] = {}
        self.parents: dict[Key, Key] = {}
        self.pins: dict[Who, tuple[Tier, list[Key]]] = {}

    def tier(self, tier: Tier) -> dict[Key, int]:
        """What is stored there."""
        return self.cpu if tier is Tier.CPU else self.ssd

    def pinned(self, tier: Tier) -> set[Key]:
        """Keys that swapped requests need."""
        return {key for where, keys in self.pins.values() if where is tier for key in keys}

    def behind(self, tops: Iterable[Key], known: set[Key]) -> set[Key]:
        """These keys and those of `known` that stand behind them, without a gap."""
        found = set(tops)
        while more := {key for key in known if self.parents[key] in found and key not in found}:
            found |= more
        return found

    # What happens to what is stored.

    def stored(self, tier: Tier, slot: int) -> None:
        """A copy into the slot is good. A second one of a key counts for nothing."""
        filling = self.cpu_filling if tier is Tier.CPU else self.ssd_filling
        key = filling.pop(slot, None)
        if key is not None:
            self.tier(tier).setdefault(key, slot)

    def bad(self, tier: Tier, key: Key, slot: int) -> None:
        """What stands there is not what it should be."""
        stored = self.tier(tier)
        if stored.get(key) == slot:
            for each in self._connected(stored, key):
                del stored[each]

    def _connected(self, stored: dict[Key, int], top: Key) -> list[Key]:
        """What stands behind a key in one tier without a gap."""
        found: list[Key] = []
        wave = [top]
        while wave:
            key = wave.pop()
            found.append(key)
            wave += [child for child in stored if self.parents[child] == key]
        return found

    def forget(self, doomed: set[Key]) -> tuple[int, int]:
        """Content that nobody may find any more."""
        counts = []
        for stored, filling in ((self.cpu, self.cpu_filling), (self.ssd, self.ssd_filling)):
            gone = [key for key in stored if key in doomed]
            for key in gone:
                del stored[key]
            for slot in [slot for slot, key in filling.items() if key in doomed]:
                del filling[slot]
            counts.append(len(gone))
        return counts[0], counts[1]

    def observe(self, tiers: Tiers) -> None:
        """What is gone was evicted, lawfully; all else is as foretold."""
        for tier, table in ((Tier.CPU, tiers.lower.cpu), (Tier.SSD, tiers.lower.ssd)):
            stored = self.tier(tier)
            evicted = set(stored) - set(table.index.sealed)
            assert not evicted & self.pinned(tier), f"{tier.name}: a pinned entry was evicted"
            for key in evicted:
                del stored[key]
            assert not {self.parents[key] for key in stored} & evicted, f"{tier.name}: a parent went before its child"
            assert stored == table.index.sealed
            assert set(table.pinned) == self.pinned(tier)

    # What is asked.

    def run(self, keys: Sequence[Key], places: Sequence[bool]) -> list[bool]:
        """What can be loaded of a chain; True: from the CPU tier. `places`: by SSD slot."""
        found: list[bool] = []
        for key in keys:
            if key not in self.cpu and (key not in self.ssd or found.count(False) == self.limits.cpu_slots):
                break
            found.append(key in self.cpu)
        while found and not found[-1] and not places[self.ssd[keys[len(found) - 1]]]:
            found.pop()
        return found

    def check_hits(self, hits: ChainHits, keys: Sequence[Key], places: Sequence[bool]) -> None:
        """The look-up says what there is."""
        run = self.run(keys[hits.device_blocks :], places) if not hits.pending_blocks else []
        assert (hits.cpu_blocks, hits.ssd_blocks) == (run.count(True), run.count(False))

    def check_load(self, result: ReserveResult, run: list[bool], most: int, cpu: SlotTable, unpinned: bool) -> None:
        """The load has what can be had, unless there was no slot to read it into. `unpinned`: more slots may be had
        since, for pins have ended."""
        count = result.cpu_blocks + result.ssd_blocks
        assert (result.ticket > 0) == (count > 0)
        wanted = run[:most]
        expected = (wanted[:count].count(True), wanted[:count].count(False))
        assert (result.cpu_blocks, result.ssd_blocks) == expected, (result, run, most)
        if count < len(wanted):
            own = wanted[count:].count(True)  # slots that the load itself used, until it was cut
            full = cpu.available <= own or max(cpu.tenants.values()) == cpu.tenant_most
            assert not wanted[count] and (full or unpinned), (result, wanted, most, cpu.available)

    def swap(self, who: Who, tier: Tier, chain: list[Key], result: SwapResult) -> None:
        """A prefix of the chain is pinned, within the budget; older swaps go for it."""
        if result.code is ResultCode.NOT_HELD:
            return
        self.pins.pop(who, None)
        slots = self.limits.cpu_slots if tier is Tier.CPU else self.limits.ssd_slots
        budget = slots * self.limits.pin_permille // 1000
        usable = self.limits.cpu_slots > (self.limits.staging_slots if tier is Tier.CPU else 0)
        if not chain or not slots or not usable:
            assert (result.pinned_blocks, result.leaving_blocks) == (0, 0)
            return
        while len(self.pinned(tier) | set(chain)) > budget:
            oldest = next((each for each, (where, _) in self.pins.items() if where is tier), None)
            if oldest is None:
                break
            del self.pins[oldest]
        room = budget - len(self.pinned(tier) - set(chain))
        assert result.leaving_blocks <= result.pinned_blocks <= min(room, len(chain))
        if tier is Tier.CPU:
            coming = {*self.cpu_filling.values(), *self.cpu}
            assert result.leaving_blocks >= sum(key not in coming for key in chain[: result.pinned_blocks])
        if result.pinned_blocks:
            self.pins[who] = (tier, chain[: result.pinned_blocks])
