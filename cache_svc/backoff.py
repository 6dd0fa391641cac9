"""When to try again what failed: after a pause that doubles while it keeps failing."""

from __future__ import annotations

FIRST_S = 0.5
LAST_S = 30.0


class Backoff:
    """Not thread-safe: its user locks. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._pause_s = FIRST_S
        self._not_before = 0.0

    def ready(self, now_s: float) -> bool:
        """Whether it may be tried."""
        return now_s >= self._not_before

    def failed(self, now_s: float) -> None:
        """It was tried in vain."""
        self._not_before = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_S)

    def worked(self) -> None:
        """It works."""
        self._pause_s = FIRST_S
        self._not_before = 0.0
