"""What lies below a modelled device: how much of it there is, and how fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cache_svc.tiers import TierLimits

MB = 1_000_000


_KEEP = 0.9
"""Of a measured rate, with each new block."""


def no_delay() -> int:
    """None."""
    return 0


@dataclass(slots=True)
class Link:
    """How fast bytes go one way, as it is now, and as it was measured. `delay_us`: beside that, before each block."""

    bytes_per_s: int
    delay_us: Callable[[], int] = no_delay
    measured: float = 0.0
    moved_bytes: int = 0
    busy_us: int = 0

    def took_us(self, size: int) -> int:
        """Of a block that begins now."""
        return self.delay_us() + max(1, size * 1_000_000 // self.bytes_per_s)

    def learn(self, size: int, took_us: int) -> None:
        """A block of `size` bytes was under way so long."""
        self.moved_bytes += size
        self.busy_us += took_us
        rate = size * 1e6 / took_us
        self.measured = _KEEP * self.measured + (1 - _KEEP) * rate if self.measured else rate


@dataclass(slots=True)
class TierModel:
    """Sizes and the four ways: `out` of the device into the CPU tier, `into` the device, `write` and `read` of the SSD.

    Rates and delays may be changed while it runs.
    """

    limits: TierLimits
    block_bytes: int = MB
    out: Link = field(default_factory=lambda: Link(1000 * MB))
    into: Link = field(default_factory=lambda: Link(1000 * MB))
    write: Link = field(default_factory=lambda: Link(200 * MB))
    read: Link = field(default_factory=lambda: Link(200 * MB))
