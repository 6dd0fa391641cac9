"""The real clock of the loop, with its bell."""

from __future__ import annotations

import threading
import time


class MonotonicClock:
    """Microseconds of the system's monotonic clock; rung from any thread."""

    def __init__(self) -> None:
        self._bell = threading.Event()

    def now_us(self) -> int:
        """Microseconds, never going back."""
        return time.monotonic_ns() // 1000

    def wait(self, until_us: int | None) -> None:
        """Returns when the bell was rung since the last wait, or at `until_us`."""
        timeout = None if until_us is None else max(0, until_us - self.now_us()) / 1e6
        self._bell.wait(timeout)
        self._bell.clear()

    def ring(self) -> None:
        """Ends the current or the next wait."""
        self._bell.set()
