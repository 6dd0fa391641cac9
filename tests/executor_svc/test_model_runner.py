"""The model runner: one step in flight, its result once, its errors at poll."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from executor_svc.model_runner import ModelRunner
from executor_svc.step_plan import StepPlan, StepResult
from tests.support.step_plans import Chunk, Sequences


class Bell:
    """A clock that only rings."""

    def __init__(self) -> None:
        self.rung = threading.Event()

    def now_us(self) -> int:
        return 0

    def wait(self, until_us: int | None) -> None:
        assert self.rung.wait(10.0)
        self.rung.clear()

    def ring(self) -> None:
        self.rung.set()


class GatedModel:
    """Computes nothing, when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.thread = ""
        self.begins = threading.Event()

    def run(self, plan: StepPlan) -> StepResult:
        self.begins.set()
        assert self.gate.wait(10.0)
        self.thread = threading.current_thread().name
        if plan.step == 13:
            raise ArithmeticError("step 13")
        return StepResult(plan.step, np.array([plan.step], np.int32))


def plan(step: int) -> StepPlan:
    return Sequences(1, 16).plan([Chunk(0, [1])], step=step)


def test_a_step_is_polled_once_and_runs_elsewhere() -> None:
    model, clock = GatedModel(), Bell()
    runner = ModelRunner(model, clock)
    try:
        assert not runner.busy
        assert runner.poll() is None
        runner.launch(plan(1))
        assert runner.busy
        assert runner.poll() is None
        with pytest.raises(RuntimeError):
            runner.launch(plan(2))
        model.gate.set()
        clock.wait(None)
        assert runner.busy  # until it is polled
        result = runner.poll()
        assert result is not None
        assert result.step == 1
        assert result.compute_us > 0
        assert not runner.busy
        assert runner.poll() is None
        assert model.thread != threading.current_thread().name
    finally:
        model.gate.set()
        runner.close()


def test_an_error_comes_out_at_poll_and_the_next_step_runs() -> None:
    model, clock = GatedModel(), Bell()
    model.gate.set()
    runner = ModelRunner(model, clock)
    try:
        runner.launch(plan(13))
        clock.wait(None)
        with pytest.raises(ArithmeticError, match="step 13"):
            runner.poll()
        assert not runner.busy
        runner.launch(plan(14))
        clock.wait(None)
        result = runner.poll()
        assert result is not None
        assert result.token_ids.tolist() == [14]
    finally:
        runner.close()


def test_close_waits_for_the_step_and_may_be_called_twice() -> None:
    model, clock = GatedModel(), Bell()
    runner = ModelRunner(model, clock)
    runner.launch(plan(1))
    threading.Timer(0.05, model.gate.set).start()
    runner.close()
    runner.close()
    assert runner.poll() is not None
    with pytest.raises(RuntimeError):
        runner.launch(plan(2))


def test_a_launch_returns_when_the_step_has_begun_or_takes_long() -> None:
    model, clock, begun = GatedModel(), Bell(), threading.Event()
    runner = ModelRunner(model, clock, begun)
    try:
        begun.set()  # by the step before
        runner.launch(plan(1))
        assert not begun.is_set()  # it has waited in vain
        model.gate.set()
        clock.wait(None)
        assert runner.poll() is not None
        model.begins = begun
        runner.launch(plan(2))
        assert begun.wait(10.0)
        clock.wait(None)
        assert runner.poll() is not None
    finally:
        model.gate.set()
        runner.close()
