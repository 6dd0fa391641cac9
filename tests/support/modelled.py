"""A real model under the virtual clock: computes at once, its result comes after a virtual while."""

from __future__ import annotations

from executor_svc.model.model import CpuModel
from executor_svc.step_plan import StepPlan, StepResult
from simulator.clock import VirtualClock


class ComputedModel:
    """ModelPort around CpuModel.run."""

    def __init__(self, clock: VirtualClock, model: CpuModel) -> None:
        self._clock = clock
        self._model = model
        self._result: StepResult | None = None
        self._busy = False

    @property
    def busy(self) -> bool:
        """Whether a launched step has not been polled yet."""
        return self._busy

    def launch(self, plan: StepPlan) -> None:
        """Runs the plan now."""
        self._busy = True
        result = self._model.run(plan)

        def end() -> None:
            self._result = result

        self._clock.after(10_000 + 100 * plan.tokens, end)

    def poll(self) -> StepResult | None:
        """The result, once."""
        result, self._result = self._result, None
        if result is not None:
            self._busy = False
        return result
