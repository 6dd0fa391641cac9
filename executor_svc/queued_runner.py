"""A device's model as the loop sees it: steps are queued on a thread of their own, and waited for on another.

So that a second step can be queued while the first is computed, the host waits for no step before it has queued what
there is. The device computes them in order; what one draws, the next takes from the device's memory.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Generic, Protocol, TypeVar

from executor_svc.ports import Clock
from executor_svc.step_plan import STEPS_IN_FLIGHT, StepPlan, StepResult

Submitted = TypeVar("Submitted")


class QueueModel(Protocol[Submitted]):
    """A model that computes steps elsewhere, e.g. model.DeviceModel; each half belongs to one thread."""

    def submit(self, plan: StepPlan) -> Submitted:
        """Queues the step behind those that run; may raise."""

    def collect(self, submitted: Submitted, /) -> StepResult:
        """Waits for the step; may raise."""


class QueuedRunner(Generic[Submitted]):
    """A ModelPort. `launch` and `poll` belong to the loop's thread; the end of a step rings the clock's bell."""

    queues = True

    def __init__(self, model: QueueModel[Submitted], clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._submitted: SimpleQueue[tuple[int, Submitted] | BaseException | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._in_flight = 0
        self._closed = False
        works = (self._submit, self._collect)
        self._threads = [threading.Thread(target=work, name="model", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """See ModelPort."""
        return self._in_flight > 0

    def launch(self, plan: StepPlan) -> None:
        """See ModelPort. RuntimeError if as many steps are in flight as may be, or the runner is closed."""
        if self._closed or self._in_flight >= STEPS_IN_FLIGHT:
            raise RuntimeError(
                "the model runner is closed" if self._closed else f"{self._in_flight} steps are in flight"
            )
        self._in_flight += 1
        self._plans.put(plan)

    def poll(self) -> StepResult | None:
        """See ModelPort."""
        if self._results.empty():
            return None
        result = self._results.get()
        self._in_flight -= 1
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Waits for the steps in flight and ends the threads. May be called twice."""
        self._closed = True
        self._plans.put(None)
        for thread in self._threads:
            thread.join()

    def _submit(self) -> None:
        while (plan := self._plans.get()) is not None:
            began_ns = perf_counter_ns()
            try:
                self._submitted.put((began_ns, self._model.submit(plan)))
            except BaseException as error:  # whatever it is, the loop must hear of it
                self._submitted.put(error)
        self._submitted.put(None)

    def _collect(self) -> None:
        ended_ns = 0  # the step before: until then this one waited
        while (submitted := self._submitted.get()) is not None:
            try:
                if isinstance(submitted, BaseException):
                    raise submitted
                began_ns, step = submitted
                result = self._model.collect(step)
                began_ns, ended_ns = max(began_ns, ended_ns), perf_counter_ns()
                self._results.put(replace(result, compute_us=max(1, (ended_ns - began_ns) // 1000)))
            except BaseException as error:  # whatever it is, the loop must hear of it
                self._results.put(error)
            self._clock.ring()
