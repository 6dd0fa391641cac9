"""Keys of long prompts, computed away from the loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from executor_svc.clock import MonotonicClock
from executor_svc.hasher import INLINE_BLOCKS, HashWorker
from executor_svc.live_request import LiveRequest
from executor_svc.request import Submission
from jitney.block_ops import RequestId
from jitney.keys import Root, chain, salt_digest
from simulator.text import NumberText

BLOCK_TOKENS = 4
LONG = 3 * INLINE_BLOCKS * BLOCK_TOKENS


class Bench:
    """A worker."""

    def __init__(self) -> None:
        self.worker = HashWorker(MonotonicClock(), BLOCK_TOKENS)

    def hashed(self, request: LiveRequest) -> bool:
        """Whether the keys, which are not there, are so when the worker has done all that it was asked to."""
        assert not self.worker.ready(request)
        self.worker.close()
        return self.worker.ready(request)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.worker.close()


def request(number: int, prompt: int, resumed: int = 0) -> LiveRequest:
    """With so many tokens in its prompt, and so many that an earlier stream has generated."""
    ids = np.arange(prompt, dtype=np.int32)
    submission = Submission("r", ids, 8, NumberText(()), resumed_ids=range(resumed))
    return LiveRequest(RequestId(number), submission, Root("", "m", "", b"f"), salt_digest(""), None)


def test_a_long_prompt_is_hashed_by_the_worker(bench: Bench) -> None:
    long = request(1, LONG)
    assert bench.hashed(long)
    assert long.hash_to(LONG, BLOCK_TOKENS) == chain(long.root.key(), long.tokens[:LONG], BLOCK_TOKENS)
    assert bench.worker.ready(request(2, INLINE_BLOCKS * BLOCK_TOKENS))


def test_a_long_answer_that_is_resumed_is_hashed_too(bench: Bench) -> None:
    resumed = request(1, 10, LONG)
    assert bench.hashed(resumed)
    total = resumed.length
    assert resumed.hash_to(total, BLOCK_TOKENS) == chain(resumed.root.key(), resumed.tokens[:total], BLOCK_TOKENS)


def test_a_request_that_nobody_asks_for_again_is_forgotten(bench: Bench) -> None:
    assert not bench.worker.ready(request(1, LONG))
    assert bench.hashed(request(2, LONG))
    assert not bench.worker.queued
