"""The model as the loop sees it: one step in flight, computed on a thread of its own."""

from __future__ import annotations

import threading
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Protocol

from executor_svc.ports import Clock
from executor_svc.step_plan import StepPlan, StepResult

HAND_OVER_S = 0.002
"""A step that has not begun by then has failed, or will take long."""


class StepModel(Protocol):
    """Whatever computes a step while the caller waits, e.g. model.CpuModel."""

    def run(self, plan: StepPlan) -> StepResult:
        """Computes the step; may raise."""


class ModelRunner:
    """A ModelPort. `launch` and `poll` belong to the loop's thread; the end of a step rings the clock's bell.

    `begun` is set by the model where a step's arithmetic begins. A launch waits for it: the loop's thread has a lot to
    do from there on, and all of it needs the interpreter, which the model's thread would get in slices meanwhile.
    """

    queues = False

    def __init__(self, model: StepModel, clock: Clock, begun: threading.Event | None = None) -> None:
        self._model = model
        self._clock = clock
        self._begun = begun
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """See ModelPort."""
        return self._busy

    def launch(self, plan: StepPlan) -> None:
        """See ModelPort. RuntimeError if a step is in flight or the runner is closed."""
        if self._busy or self._closed:
            raise RuntimeError("a step is in flight" if self._busy else "the model runner is closed")
        self._busy = True
        if self._begun is None:
            self._plans.put(plan)
            return
        self._begun.clear()
        self._plans.put(plan)
        self._begun.wait(HAND_OVER_S)

    def poll(self) -> StepResult | None:
        """See ModelPort."""
        if self._results.empty():
            return None
        result = self._results.get()
        self._busy = False
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Waits for the step in flight and ends the thread. May be called twice."""
        self._closed = True
        self._plans.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (plan := self._plans.get()) is not None:
            started = perf_counter_ns()
            try:
                result = self._model.run(plan)
                self._results.put(replace(result, compute_us=(perf_counter_ns() - started) // 1000))
            except BaseException as error:  # whatever it is, the loop must hear of it
                self._results.put(error)
            self._clock.ring()
