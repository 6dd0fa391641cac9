"""Whether blocks that lie in lower tiers are loaded or computed anew: by whatever is faster.

    load    = blocks / rate into the device, + blocks of the SSD / its read rate, + the wait in the copy queues
    compute = as in costs, from the last block on the device to the last one loaded

A new request is not kept waiting longer than it must. One that was preempted is loaded also where it would be computed
sooner, if all rows of a step together lose more by that: computing keeps all of them waiting (see costs), a load only
itself.

Either all that was found is loaded, or only as many blocks as the CPU tier has, or none. A look-up tells counts: where
the two tiers alternate along a chain, "as many as the CPU tier has" may name some of the SSD's, and the cache takes
the first ones of the chain wherever they are. A rate into the device that is not known costs nothing, since a copy is
nearly always faster than a prefill; an SSD that was not read yet is taken for a slow one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jitney.snapshot import LowerTiers, Snapshot
from scheduler_svc.costs import MAX_BLOCK_NS, compute_us

ASSUMED_READ_BYTES_PER_S = 200_000_000
"""Of an SSD whose rate is not known yet: after a restart the first hits are there."""


class Load(NamedTuple):
    """The first `blocks` of those that were `found` are loaded, `ssd` of them from the SSD; what that takes, and what
    it takes to compute the same. Where no load pays `blocks` is 0, and the times are those of the one that comes
    nearest to it."""

    blocks: int = 0
    ssd: int = 0
    found: int = 0
    load_us: int = 0
    compute_us: int = 0


NO_LOAD = Load()


@dataclass(slots=True)
class LoadCosts:
    """Nanoseconds a block, 0 unknown; the waits grow with each load that is taken."""

    snapshot: Snapshot
    copy_ns: int
    read_ns: int
    copy_wait_us: int
    read_wait_us: int

    @classmethod
    def of(cls, snapshot: Snapshot) -> LoadCosts:
        """By the rates measured."""
        rates = snapshot.rates
        return cls(
            snapshot=snapshot,
            copy_ns=_block_ns(rates.block_bytes, rates.to_device_bytes_per_s),
            read_ns=_block_ns(rates.block_bytes, rates.ssd_read_bytes_per_s or ASSUMED_READ_BYTES_PER_S),
            copy_wait_us=snapshot.cpu.queue_us,
            read_wait_us=snapshot.ssd.queue_us,
        )

    def best(self, device: int, cpu: int, ssd: int, rows: int = 1) -> Load:
        """Of a request that has so many blocks on the device, then in the CPU tier and on the SSD. `rows` wait while it
        is computed."""
        found = cpu + ssd
        if self.snapshot.settings.lower_tiers is LowerTiers.NEVER:
            return Load(found=found)
        parts = [(cpu, 0)] if cpu else []
        if ssd and self.read_ns:
            parts.append((found, ssd))
        loads = [Load(n, read, found, self.load_us(n, read), self.compute_us(device, n)) for n, read in parts]
        best = max(loads, key=lambda load: load.compute_us * rows - load.load_us, default=Load(found=found))
        return best if best.load_us < best.compute_us * rows else best._replace(blocks=0, ssd=0)

    def unseen(self, blocks: int, rows: int = 1) -> Load:
        """Of a request that was not looked up: all that there is of its `blocks`, wherever it is, if that pays for each
        block of it, with `rows` that wait while it is computed. Found are none."""
        cpu, ssd = (room.free_blocks + room.pin_blocks > 0 for room in (self.snapshot.cpu, self.snapshot.ssd))
        if not (cpu or ssd) or (ssd and not self.read_ns):
            return NO_LOAD
        if self.snapshot.settings.lower_tiers is LowerTiers.NEVER:
            return NO_LOAD
        pays = self.copy_ns + (self.read_ns if ssd else 0) < 1000 * self.compute_us(0, 1) * rows
        return Load(blocks=blocks) if pays else NO_LOAD

    def take(self, load: Load) -> None:
        """It goes into the queues, in front of later ones."""
        self.copy_wait_us += min(load.blocks, load.found) * self.copy_ns // 1000
        self.read_wait_us += load.ssd * self.read_ns // 1000

    def compute_us(self, device: int, blocks: int) -> int:
        """To compute so many blocks behind those on the device."""
        size = self.snapshot.settings.block_tokens
        first, last = np.array([device * size], np.int64), np.array([(device + blocks) * size], np.int64)
        return int(compute_us(self.snapshot, first, last)[0])

    def load_us(self, blocks: int, read: int) -> int:
        """To load so many blocks, `read` of them from the SSD."""
        wait_us = self.copy_wait_us + (self.read_wait_us if read else 0)
        return wait_us + (blocks * self.copy_ns + read * self.read_ns) // 1000


def _block_ns(block_bytes: int, bytes_per_s: int) -> int:
    return min(block_bytes * 1_000_000_000 // bytes_per_s, MAX_BLOCK_NS) if bytes_per_s else 0
