"""The runner of a device's steps: one is queued behind another, results come in order, errors at poll."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np
import pytest

from executor_svc.queued_runner import QueuedRunner
from executor_svc.step_plan import StepPlan, StepResult
from tests.support.step_plans import Chunk, Sequences


class Bell:
    """A clock that only rings."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def now_us(self) -> int:
        return 0

    def wait(self, until_us: int | None) -> None:
        self._rings.get(timeout=10.0)

    def ring(self) -> None:
        self._rings.put(None)


class Device:
    """Steps end when they are let; step 13 cannot be submitted, step 14 not collected."""

    def __init__(self) -> None:
        self.submitted: SimpleQueue[int] = SimpleQueue()
        self.ends: dict[int, threading.Event] = {step: threading.Event() for step in range(20)}
        self.threads: set[int] = set()

    def submit(self, plan: StepPlan) -> int:
        self.threads.add(threading.get_ident())
        if plan.step == 13:
            raise ArithmeticError("step 13")
        self.submitted.put(plan.step)
        return plan.step

    def collect(self, submitted: int, /) -> StepResult:
        self.threads.add(threading.get_ident())
        assert self.ends[submitted].wait(10.0)
        if submitted == 14:
            raise ArithmeticError("step 14")
        return StepResult(submitted, np.array([submitted], np.int32))


def plan(step: int) -> StepPlan:
    return Sequences(1, 16).plan([Chunk(0, [1])], step=step)


def test_a_step_is_submitted_before_the_one_before_it_is_collected() -> None:
    device, clock = Device(), Bell()
    runner = QueuedRunner(device, clock)
    try:
        assert not runner.busy
        runner.launch(plan(1))
        runner.launch(plan(2))
        assert [device.submitted.get(timeout=10.0) for _ in range(2)] == [1, 2]
        assert runner.poll() is None  # neither is over
        with pytest.raises(RuntimeError, match="2 steps are in flight"):
            runner.launch(plan(3))
        for step in (1, 2):
            device.ends[step].set()
            clock.wait(None)
            assert runner.busy
            result = runner.poll()
            assert result is not None
            assert (result.step, result.token_ids.tolist()) == (step, [step])
            assert result.compute_us > 0
        assert not runner.busy
        assert runner.poll() is None
        assert len(device.threads) == 2
        assert threading.get_ident() not in device.threads
    finally:
        runner.close()


@pytest.mark.parametrize("step", [13, 14])
def test_an_error_comes_out_at_poll_in_its_turn(step: int) -> None:
    device, clock = Device(), Bell()
    for end in device.ends.values():
        end.set()
    runner = QueuedRunner(device, clock)
    try:
        runner.launch(plan(1))
        runner.launch(plan(step))
        for _ in range(2):
            clock.wait(None)
        result = runner.poll()
        assert result is not None
        assert result.step == 1
        with pytest.raises(ArithmeticError, match=f"step {step}"):
            runner.poll()
        assert not runner.busy
    finally:
        runner.close()


def test_close_waits_for_the_steps_and_may_be_called_twice() -> None:
    device, clock = Device(), Bell()
    runner = QueuedRunner(device, clock)
    runner.launch(plan(1))
    runner.launch(plan(2))
    for step in (1, 2):
        device.ends[step].set()
    runner.close()
    runner.close()
    assert [result.step for result in (runner.poll(), runner.poll()) if result is not None] == [1, 2]
    with pytest.raises(RuntimeError, match="closed"):
        runner.launch(plan(3))
