"""Readers that take nothing: their streams are ended, so that no answer is kept for nobody."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from jitney.errors import TooLarge

LOOKS: Final = 8  # so many within the time that a reader has


class Readers:
    """Writes that wait for their reader. All are looked at together now and then: a timer for each of them, one a token
    and stream, would cost as much as a fifth of the write. Belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._since: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._looks = False

    async def write(self, context: Any, message: Any) -> None:
        """One message to the reader of a call; raises TooLarge if it takes nothing for too long."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._since[task] = self._loop.time()
        if not self._looks:
            self._looks = True
            self._loop.call_later(self._limit_s / LOOKS, self._look)
        try:
            await context.write(message)
        except asyncio.CancelledError:
            if task not in self._late or task.uncancel():
                raise
            what = f"the reader has taken nothing for {self._limit_s:g} s"
            raise TooLarge(what, field="stream", limit=f"{self._limit_s:g} s", value="full") from None
        finally:
            del self._since[task]
            self._late.discard(task)

    def _look(self) -> None:
        oldest = self._loop.time() - self._limit_s
        for task, since in self._since.items():
            if since < oldest and task not in self._late:
                self._late.add(task)
                task.cancel()
        self._looks = bool(self._since)
        if self._looks:
            self._loop.call_later(self._limit_s / LOOKS, self._look)
