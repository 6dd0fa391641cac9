"""The executor's loop with real scheduler and cache processes, and a model that returns at once.

What is left is the control path: registry and snapshot, Decide over gRPC, Apply over gRPC, state update. Requests come
from `bench.workload`; for each one that ends another one arrives.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from bench.live_loop import LiveLoop, Recorder, Silence
from bench.workload import BLOCK_TOKENS, CONTEXT_TOKENS, POOL_BLOCKS, STEP_TOKENS, Asked, Workload
from executor_svc.clock import MonotonicClock
from executor_svc.live_request import LiveRequest
from executor_svc.request import Submission
from executor_svc.situation import Reads
from executor_svc.step_plan import StepPlan, StepResult
from jitney.snapshot import PolicyChoice, PolicyMemory, Settings

SECONDS_TO_FILL = 300.0


class InstantModel:
    """ModelPort whose steps take no time, though it says that they did; every row's next token is 1."""

    queues = False

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


@dataclass(frozen=True, slots=True)
class Round:
    """Some steps under one policy. `control_us` are the times from one launch to the next."""

    rtt_us: list[float]
    control_us: list[float]


class ControlPath(LiveLoop):
    """One executor at `running` rows with `waiting` requests behind them."""

    def __init__(self, scheduler: str, cache: str, running: int, waiting: int, seed: int) -> None:
        settings = Settings(
            max_step_tokens=STEP_TOKENS,
            max_rows=running,
            block_tokens=BLOCK_TOKENS,
            context_tokens=CONTEXT_TOKENS,
            chunk_cap_tokens=512,
        )
        super().__init__(scheduler, cache, settings, POOL_BLOCKS, InstantModel)
        self._newest: deque[tuple[bytes, bytes]] = deque(maxlen=16)
        self.record = self._keep
        self._workload = Workload(seed)
        for _ in range(running + waiting):
            self._arrive()

    def fill(self) -> None:
        """Steps until all rows are taken."""
        end = time.monotonic() + SECONDS_TO_FILL
        while len(self.loop.registry.running) < self.loop.settings.max_rows:
            self.loop.tick()
            if time.monotonic() > end:
                raise TimeoutError(f"{len(self.loop.registry.running)} rows run after {SECONDS_TO_FILL:g} s")
        gc.collect()
        gc.freeze()

    def follow(self, policy: str, reads: Reads, steps: int) -> None:
        """Another policy from now on, and some steps for it to settle."""
        self.loop.policy.choice = PolicyChoice(policy)
        self.loop.policy.memory = PolicyMemory()
        self.loop.policy.reads = reads
        self._take(steps)

    def steps(self, count: int, record: Recorder | None = None) -> Round:
        """So many steps; `record` is given each snapshot, its decision and the round trip."""
        rtt: list[float] = []

        def decided(snapshot: bytes, decision: bytes, round_trip_us: int) -> None:
            rtt.append(round_trip_us)
            self._keep(snapshot, decision, round_trip_us)
            if record is not None:
                record(snapshot, decision, round_trip_us)

        self.record = decided
        launched_ns = self._take(count)
        self.record = self._keep
        return Round(rtt, (np.diff(launched_ns) / 1e3).tolist())

    def snapshots(self) -> list[bytes]:
        """The newest that were decided on."""
        return [snapshot for snapshot, _ in self._newest]

    def newest(self) -> tuple[bytes, bytes]:
        """The newest snapshot that was decided on, and its decision."""
        return self._newest[-1]

    def _take(self, count: int) -> list[int]:
        model = self.loop.model
        assert isinstance(model, InstantModel)
        model.launched_ns.clear()
        while len(model.launched_ns) <= count:
            self.loop.tick()
        return model.launched_ns

    def _keep(self, snapshot: bytes, decision: bytes, round_trip_us: int) -> None:
        self._newest.append((snapshot, decision))

    def _arrive(self) -> None:
        self.submit(_submission(self._workload.next()), self._changed)

    def _changed(self, request: LiveRequest) -> None:
        if request.answer.finish is not None:
            self._arrive()


def _submission(asked: Asked) -> Submission:
    return Submission(
        client_id=f"r{asked.number}",
        prompt_ids=asked.prompt_ids,
        max_tokens=asked.max_tokens,
        text=Silence(),
        priority=asked.priority,
        tenant=f"tenant-{asked.tenant}",
        endpoint=f"endpoint-{asked.endpoint}",
        ttft_deadline_us=3_600_000_000,
        deadline_us=7_200_000_000,
    )
