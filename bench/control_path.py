"""The executor's real loop, with a real scheduler process, a real cache process, and a model that returns at once.

What is left is the control path: registry and snapshot, Decide over gRPC, Apply over gRPC, state update. Requests come
from `bench.workload`; for each one that ends another one arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.workload import BLOCK_TOKENS, CONTEXT_TOKENS, POOL_BLOCKS, STEP_TOKENS, Asked, Workload
from executor_svc.cache_client import CacheClient, CachePool
from executor_svc.clock import MonotonicClock
from executor_svc.hasher import HashWorker
from executor_svc.live_request import LiveRequest
from executor_svc.loop import Loop, LoopSettings
from executor_svc.rates import MeasuredRates
from executor_svc.request import Sampling, Submission
from executor_svc.scheduler_client import SchedulerClient
from executor_svc.situation import Identity, Policy
from executor_svc.step_plan import StepPlan, StepResult
from jitney.block_ops import RequestId
from jitney.keys import Root, salt_digest
from jitney.service_process import ServiceProcess
from jitney.snapshot import PolicyChoice, PolicyMemory, Settings

NEVER_US = 1 << 50
SECONDS_TO_FILL = 300.0
Recorder = Callable[[bytes, bytes, int], None]


class InstantModel:
    """ModelPort whose steps take no time, though it says that they did; every row's next token is 1."""

    def __init__(self, clock: MonotonicClock) -> None:
        self._clock = clock
        self._result: StepResult | None = None
        self.launched_ns: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether a launched step has not been polled yet."""
        return self._result is not None

    def launch(self, plan: StepPlan) -> None:
        """Is through at once."""
        self.launched_ns.append(time.perf_counter_ns())
        told_us = 10_000 + 20 * plan.rows + 100 * plan.tokens
        self._result = StepResult(plan.step, np.ones(len(plan.sample_rows), np.int32), compute_us=told_us)
        self._clock.ring()

    def poll(self) -> StepResult | None:
        """The result, once."""
        result, self._result = self._result, None
        return result


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


@dataclass(frozen=True, slots=True)
class Round:
    """Some steps under one policy. `control_us` are the times from one launch to the next."""

    rtt_us: list[float]
    control_us: list[float]


class ControlPath:
    """One executor at `running` rows with `waiting` requests behind them. Use it in a `with` block."""

    def __init__(self, scheduler: str, cache: str, running: int, waiting: int, seed: int) -> None:
        self._asyncio = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._asyncio.run_forever, name="clients", daemon=True)
        self._thread.start()
        self._clock = MonotonicClock()
        self._record: Recorder | None = None
        self._snapshots: deque[bytes] = deque(maxlen=16)
        incarnation = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
        pool = CachePool(f"bench-{running}-{waiting}", incarnation, b"bench", POOL_BLOCKS, 1, BLOCK_TOKENS)
        self._cache = CacheClient(cache, pool, self._clock)
        self._on_asyncio(self._cache.open())
        self._scheduler = SchedulerClient(
            [scheduler], self._clock, self._asyncio, timeout_s=60.0, record=self._decided
        )
        self._hasher = HashWorker(self._clock, BLOCK_TOKENS)
        self.model = InstantModel(self._clock)
        settings = Settings(
            max_step_tokens=STEP_TOKENS,
            max_rows=running,
            block_tokens=BLOCK_TOKENS,
            context_tokens=CONTEXT_TOKENS,
            chunk_cap_tokens=512,
        )
        self.loop = Loop(
            Identity(pool.executor, incarnation),
            settings,
            LoopSettings(POOL_BLOCKS, coast_after_us=NEVER_US, ask_again_after_us=NEVER_US),
            Policy(),
            clock=self._clock,
            rates=MeasuredRates(1),
            scheduler=self._scheduler,
            cache=self._cache,
            model=self.model,
            hasher=self._hasher,
        )
        self._cache.state = self.loop.apply
        self._scheduler.start()
        self._ids = itertools.count(1)
        self._root = Root("", "bench")
        self._salt = salt_digest("")
        self._workload = Workload(seed)
        for _ in range(running + waiting):
            self._arrive()

    def __enter__(self) -> ControlPath:
        return self

    def __exit__(self, *_: object) -> None:
        self._on_asyncio(self._scheduler.close())
        self._on_asyncio(self._cache.close())
        self._hasher.close()
        self._asyncio.call_soon_threadsafe(self._asyncio.stop)
        self._thread.join()
        self._asyncio.close()
        gc.unfreeze()

    def fill(self) -> None:
        """Steps until all rows are taken."""
        end = time.monotonic() + SECONDS_TO_FILL
        while len(self.loop.registry.running) < self.loop.settings.max_rows:
            self.loop.tick()
            if time.monotonic() > end:
                raise TimeoutError(f"{len(self.loop.registry.running)} rows run after {SECONDS_TO_FILL:g} s")
        gc.collect()
        gc.freeze()

    def follow(self, policy: str, columns: frozenset[str], steps: int) -> None:
        """Another policy from now on, and some steps for it to settle."""
        self.loop.policy.choice = PolicyChoice(policy)
        self.loop.policy.memory = PolicyMemory()
        self.loop.policy.waiting_columns = columns
        self._take(steps)

    def steps(self, count: int, record: Recorder | None = None) -> Round:
        """So many steps; `record` is given each snapshot and its decision."""
        self._record = record
        answered = self._scheduler.answered
        self._take(count)
        self._record = None
        new = min(self._scheduler.answered - answered, count)
        times = self._scheduler.round_trips_us()
        last = (self._scheduler.answered - 1) % len(times)
        rtt = np.roll(times, -last - 1)[-new:]
        return Round(rtt.tolist(), (np.diff(self.model.launched_ns) / 1e3).tolist())

    def snapshots(self) -> list[bytes]:
        """The newest that were decided on."""
        return list(self._snapshots)

    def _take(self, count: int) -> None:
        self.model.launched_ns.clear()
        while len(self.model.launched_ns) <= count:
            self.loop.tick()

    def _decided(self, snapshot: bytes, decision: bytes, round_trip_us: int) -> None:
        self._snapshots.append(snapshot)
        if self._record is not None:
            self._record(snapshot, decision, round_trip_us)

    def _on_asyncio(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._asyncio).result(60)

    def _arrive(self) -> None:
        submission = _submission(self._workload.next())

        def changed() -> None:
            if request.answer.finish is not None:
                self._arrive()

        request = LiveRequest(RequestId(next(self._ids)), submission, self._root, self._salt, changed)
        self.loop.intake.submit(request, self._clock.now_us())


def _submission(asked: Asked) -> Submission:
    return Submission(
        client_id=f"r{asked.number}",
        prompt_ids=asked.prompt_ids,
        max_tokens=asked.max_tokens,
        text=Silence(),
        sampling=Sampling(),
        priority=asked.priority,
        tenant=f"tenant-{asked.tenant}",
        endpoint=f"endpoint-{asked.endpoint}",
        ttft_deadline_us=3_600_000_000,
        deadline_us=7_200_000_000,
    )
