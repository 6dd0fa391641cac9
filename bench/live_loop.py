"""The executor's real loop in this process, with a real scheduler process and a real cache process beside it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import uvloop

from executor_svc.cache_client import CacheClient
from executor_svc.cache_pool import CachePool
from executor_svc.clock import MonotonicClock
from executor_svc.hasher import HashWorker
from executor_svc.live_request import LiveRequest
from executor_svc.loop import Loop, LoopSettings
from executor_svc.model_runner import ModelRunner
from executor_svc.no_copies import NoCopies
from executor_svc.ports import ModelPort
from executor_svc.rates import MeasuredRates
from executor_svc.request import Submission
from executor_svc.scheduler_client import SchedulerClient
from executor_svc.situation import Identity, Policy
from jitney.block_ops import RequestId
from jitney.keys import Root, salt_digest
from jitney.service_process import ServiceProcess
from jitney.snapshot import PolicyChoice, Settings

NEVER_US = 1 << 50
SWITCH_S = 0.0001  # as the executor's process has it
Recorder = Callable[[bytes, bytes, int], None]
T = TypeVar("T")


class Silence:
    """TextStream of a client that takes ids only."""

    def push(self, token_ids: Sequence[int]) -> str | None:
        """No stop strings."""

    def take(self) -> str:
        """No text."""
        return ""

    def finish(self) -> str:
        """No text."""
        return ""


@contextlib.contextmanager
def services(*modules: str) -> Iterator[list[ServiceProcess]]:
    """One process of each service, serving."""
    with tempfile.TemporaryDirectory(prefix="jitney-bench-") as folder:
        processes = [ServiceProcess(module, module, ("--grace-s=1",), Path(folder)) for module in modules]
        try:
            for process in processes:
                process.start()
            end = time.monotonic() + 60
            for process in processes:
                while not (process.listens() and process.serves()):
                    if process.exit_status() is not None or time.monotonic() > end:
                        raise RuntimeError(f"{process.name}: {process.last_words()}")
                    time.sleep(0.05)
            yield processes
        finally:
            for process in processes:
                process.end(5.0)


@functools.cache
def clients_loop() -> asyncio.AbstractEventLoop:
    """The event loop that talks to services, on a thread of its own, for the whole process: gRPC keeps one queue for
    all event loops."""
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, name="clients", daemon=True).start()
    return loop


def on_clients_loop(work: Coroutine[Any, Any, T]) -> T:
    """Waits for it."""
    return asyncio.run_coroutine_threadsafe(work, clients_loop()).result(120)


class LiveLoop:
    """One executor without its front door. It waits for its decisions however late they are: it never coasts.

    Use it in a `with` block; `loop.tick` is called by whoever made it.
    """

    def __init__(
        self,
        scheduler: str,
        cache: str,
        settings: Settings,
        pool_blocks: int,
        model: Callable[[MonotonicClock], ModelPort],
        policy: PolicyChoice | None = None,
    ) -> None:
        """`scheduler` and `cache` are addresses."""
        sys.setswitchinterval(SWITCH_S)
        self.clock = MonotonicClock()
        self.record: Recorder | None = None  # is given every snapshot, its decision and the round trip
        incarnation = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
        pool = CachePool(f"bench-{incarnation}", incarnation, b"bench", pool_blocks, 1, settings.block_tokens)
        self._cache = CacheClient(cache, pool, self.clock)
        on_clients_loop(self._cache.open())
        self.scheduler = SchedulerClient([scheduler], self.clock, clients_loop(), timeout_s=60.0, record=self._decided)
        self._hasher = HashWorker(self.clock, settings.block_tokens)
        self.loop = Loop(
            Identity(pool.executor, incarnation),
            settings,
            LoopSettings(pool_blocks, coast_after_us=NEVER_US, ask_again_after_us=NEVER_US),
            Policy(policy or PolicyChoice()),
            clock=self.clock,
            rates=MeasuredRates(1),
            scheduler=self.scheduler,
            cache=self._cache,
            model=model(self.clock),
            copies=NoCopies(),
            hasher=self._hasher,
        )
        self._cache.state = self.loop.apply
        self.scheduler.start()
        self._ids = itertools.count(1)
        self._root, self._salt = Root("", "bench"), salt_digest("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        on_clients_loop(self.scheduler.close())
        on_clients_loop(self._cache.close())
        self._hasher.close()
        if isinstance(self.loop.model, ModelRunner):
            self.loop.model.close()

    def submit(self, submission: Submission, on_change: Callable[[LiveRequest], None]) -> LiveRequest:
        """A request that arrives now."""

        def changed() -> None:
            on_change(request)

        request = LiveRequest(RequestId(next(self._ids)), submission, self._root, self._salt, changed)
        self.loop.intake.submit([request], self.clock.now_us())
        return request

    def _decided(self, snapshot: bytes, decision: bytes, round_trip_us: int) -> None:
        if self.record is not None:
            self.record(snapshot, decision, round_trip_us)
