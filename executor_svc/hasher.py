"""Block keys of waiting requests, computed away from the loop: about a microsecond a block."""

from __future__ import annotations

import queue
import threading

from executor_svc.live_request import LiveRequest
from executor_svc.ports import Clock
from jitney.keys import chain

INLINE_BLOCKS = 64


class InlineHasher:
    """Hashes on the caller's thread: for the simulator."""

    def ready(self, request: LiveRequest) -> bool:
        """Always."""
        return True


class HashWorker:
    """One thread that hashes long prompts; short ones are hashed where they are needed."""

    def __init__(self, clock: Clock, block_tokens: int) -> None:
        self._clock = clock
        self._block_tokens = block_tokens
        self._queue: queue.SimpleQueue[LiveRequest | None] = queue.SimpleQueue()
        self.queued: set[int] = set()  # ids of requests that are being hashed, or will be
        self._thread = threading.Thread(target=self._run, name="hasher", daemon=True)
        self._thread.start()

    def ready(self, request: LiveRequest) -> bool:
        """Whether the keys are there or are few; else they are being computed."""
        known = max(len(request.keys), len(request.hashed))
        if request.length // self._block_tokens - known <= INLINE_BLOCKS:
            return True
        if request.id not in self.queued:
            self.queued.add(request.id)
            self._queue.put(request)
        return False

    def close(self) -> None:
        """Ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            tokens = request.tokens[: request.length]  # an answer that is resumed, or was preempted, included
            request.hashed = chain(request.root.key(), tokens, self._block_tokens)
            self.queued.discard(request.id)
            self._clock.ring()
