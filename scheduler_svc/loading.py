"""Whether blocks that lie in lower tiers are loaded or computed anew: by whatever is faster.

    load    = blocks / rate into the device, + blocks of the SSD / its read rate, + the wait in the copy queues
    compute = their tokens / prefill rate

Either all that was found is loaded, or only as many blocks as the CPU tier has, or none. A look-up tells counts: where
the two tiers alternate along a chain, "as many as the CPU tier has" may name some of the SSD's, and the cache takes
the first ones of the chain wherever they are. A rate into the device that is not known costs nothing, since a copy is
nearly always faster than a prefill; an SSD that was not read yet is taken for a slow one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jitney.snapshot import Snapshot
from scheduler_svc.costs import ASSUMED_PREFILL_TOKENS_PER_S, MAX_BLOCK_NS

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

    copy_ns: int
    read_ns: int
    compute_ns: int
    copy_wait_us: int
    read_wait_us: int

    @classmethod
    def of(cls, snapshot: Snapshot) -> LoadCosts:
        """By the rates measured."""
        rates = snapshot.rates
        speed = rates.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S
        return cls(
            copy_ns=_block_ns(rates.block_bytes, rates.to_device_bytes_per_s),
            read_ns=_block_ns(rates.block_bytes, rates.ssd_read_bytes_per_s or ASSUMED_READ_BYTES_PER_S),
            compute_ns=snapshot.settings.block_tokens * 1_000_000_000 // speed,
            copy_wait_us=snapshot.cpu.queue_us,
            read_wait_us=snapshot.ssd.queue_us,
        )

    def best(self, cpu: int, ssd: int) -> Load:
        """Of a request that has so many blocks in the CPU tier and on the SSD, behind those on the device."""
        found = cpu + ssd
        parts = [(cpu, 0)] if cpu else []
        if ssd and self.read_ns:
            parts.append((found, ssd))
        loads = [Load(n, read, found, self._load_us(n, read), n * self.compute_ns // 1000) for n, read in parts]
        best = max(loads, key=lambda load: load.compute_us - load.load_us, default=Load(found=found))
        return best if best.load_us < best.compute_us else best._replace(blocks=0, ssd=0)

    def take(self, load: Load) -> None:
        """It goes into the queues, in front of later ones."""
        self.copy_wait_us += load.blocks * self.copy_ns // 1000
        self.read_wait_us += load.ssd * self.read_ns // 1000

    def _load_us(self, blocks: int, read: int) -> int:
        wait_us = self.copy_wait_us + (self.read_wait_us if read else 0)
        return wait_us + (blocks * self.copy_ns + read * self.read_ns) // 1000


def _block_ns(block_bytes: int, bytes_per_s: int) -> int:
    return min(block_bytes * 1_000_000_000 // bytes_per_s, MAX_BLOCK_NS) if bytes_per_s else 0
