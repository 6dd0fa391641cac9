"""Whether the loop makes progress: what readiness depends on.

Not ready, with the reason, when requests wait while nothing runs for ten seconds past the time at which the scheduler
wanted to be asked again, or when the loop has work and has not ticked for thirty. A missing scheduler alone does not
count while the queue has room: what waits is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor_svc.loop import Loop

STALLED_AFTER_US = 10_000_000
SILENT_AFTER_US = 30_000_000
LONGEST_SLEEP_US = 60_000_000
"""A scheduler that wants to be asked again later than this does not keep the watchdog quiet."""


class Watchdog:
    """Written by the loop at every turn, read by anyone."""

    def __init__(self) -> None:
        self._last_tick_us = 0
        self._progress_us = 0
        self._step = -1
        self._work = False
        self._reason = ""

    def ticked(self, now_us: int, loop: Loop) -> None:
        """The loop has turned."""
        self._last_tick_us = now_us
        live = loop.registry.num_waiting + len(loop.registry.running)
        self._work = live > 0
        runs = loop.model.busy or loop.step != self._step or loop.copying.loading
        limit = loop.settings.max_waiting_requests
        patient = not loop.scheduler.connected and (not limit or loop.registry.num_waiting < limit)
        if not live or runs or patient:
            self._step = loop.step
            self._progress_us = max(now_us, min(loop.course.decision.wake_at_us, now_us + LONGEST_SLEEP_US))
            self._reason = ""
        elif now_us - self._progress_us > STALLED_AFTER_US:
            why = ", ".join(f"{count} for {reason.name.lower()}" for reason, count in loop.waiting_reasons)
            self._reason = f"{live} requests wait and nothing runs ({why or 'no reason known'})"

    def not_ready(self, now_us: int) -> str:
        """Why the executor makes no progress; empty: it does, or has nothing to do."""
        if self._work and now_us - self._last_tick_us > SILENT_AFTER_US:
            return f"the loop has work and has not turned for {(now_us - self._last_tick_us) // 1_000_000} s"
        return self._reason
