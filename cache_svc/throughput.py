"""How fast something goes, from its busy time: calls that overlap share it. Recent calls count more."""

from __future__ import annotations

WINDOW_S = 4.0
"""Busy seconds after which what came before counts half."""


class Throughput:
    """Bytes a second of calls that may overlap. Not thread-safe: its user locks."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.total_s = 0.0
        self._running = 0
        self._since = 0.0
        self._bytes = 0.0
        self._busy_s = 0.0

    def began(self, now_s: float) -> None:
        """A call begins."""
        if self._running == 0:
            self._since = now_s
        self._running += 1

    def ended(self, now_s: float, count: int) -> None:
        """A call has moved `count` bytes; 0 if it failed."""
        busy_s = max(0.0, now_s - self._since)
        self._since = now_s
        self._running -= 1
        self.total_bytes += count
        self.total_s += busy_s
        if count == 0:
            return  # it says nothing of how fast the others are
        self._bytes += count
        self._busy_s += busy_s
        if self._busy_s > WINDOW_S:
            self._bytes /= 2
            self._busy_s /= 2

    @property
    def bytes_per_s(self) -> int:
        """0: unknown."""
        return int(self._bytes / self._busy_s) if self._busy_s > 0 else 0
