"""From the loop's thread to the readers: cursors on an answer, and the bell that wakes them.

The loop only appends and rings; it never waits for a reader. A reader that comes late finds many tokens at once.
"""

from __future__ import annotations

import asyncio
from collections import deque

from executor_svc.request import Answer, TokenLogprobs


class Bells:
    """Wakes readers in the event loop from any other thread; any number of rings become one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung: deque[asyncio.Event] = deque()
        self._scheduled = False

    def ring(self, bell: asyncio.Event) -> None:
        """Sets `bell`, soon. From any thread; never blocks or raises."""
        self._rung.append(bell)
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._pass_on)
            except RuntimeError:  # the event loop has closed: nobody listens any more
                self._scheduled = False

    def _pass_on(self) -> None:
        self._scheduled = False  # first, so that what is rung from here on is passed on again
        while self._rung:
            self._rung.popleft().set()


class Cursor:
    """What one reader has not seen yet of an answer."""

    __slots__ = ("_answer", "_texts", "_tokens", "_with_logprobs")

    def __init__(self, answer: Answer, with_logprobs: bool) -> None:
        self._answer = answer
        self._with_logprobs = with_logprobs
        self._tokens = 0
        self._texts = 0

    def next(self, last: bool) -> tuple[list[int], list[TokenLogprobs], str]:
        """New tokens, their log-probabilities if asked for, and new text. `last`: the answer has ended."""
        answer = self._answer
        texts = answer.texts[self._texts :]  # before the tokens: text never runs ahead of them
        end = len(answer.token_ids)
        if self._with_logprobs and not last:  # the loop appends one after the other, and may be in between
            end = min(end, len(answer.logprobs))
        tokens, logprobs = answer.token_ids[self._tokens : end], answer.logprobs[self._tokens : end]
        self._tokens = end
        self._texts += len(texts)
        return tokens, logprobs, "".join(texts)
