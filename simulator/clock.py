"""A clock that jumps from event to event."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Time passes only in `wait`, to the next event or the limit given."""

    def __init__(self) -> None:
        self._now_us = 1
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._rung = False

    def now_us(self) -> int:
        """Virtual microseconds."""
        return self._now_us

    def at(self, time_us: int, event: Callable[[], None]) -> None:
        """Runs `event` at that time; events of one time run in the order in which they were given."""
        heapq.heappush(self._events, (max(time_us, self._now_us), next(self._order), event))

    def after(self, delay_us: int, event: Callable[[], None]) -> None:
        """Runs `event` that much later."""
        self.at(self._now_us + delay_us, event)

    def wait(self, until_us: int | None) -> None:
        """Goes on to the next event, at most to `until_us`. Returns at once if the bell was rung."""
        if self._rung:
            self._rung = False
            return
        if self._events and (until_us is None or self._events[0][0] <= until_us):
            self._now_us, _, event = heapq.heappop(self._events)
            event()
            self._rung = False
        elif until_us is not None:
            self._now_us = max(self._now_us, until_us)
        else:
            raise RuntimeError("nothing will ever happen")

    def ring(self) -> None:
        """Ends the next wait."""
        self._rung = True
