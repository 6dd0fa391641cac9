"""A real model under the virtual clock."""

from __future__ import annotations

from executor_svc.model.model import CpuModel
from executor_svc.step_plan import StepPlan, StepResult
from simulator.clock import VirtualClock
from simulator.model import TimedModel, default_step_time


class ComputedModel(TimedModel):
    """CpuModel.run, in the time of the model that counts."""

    def __init__(self, clock: VirtualClock, model: CpuModel) -> None:
        super().__init__(clock)
        self._model = model

    def run(self, plan: StepPlan) -> tuple[StepResult, int]:
        """See TimedModel."""
        return self._model.run(plan), default_step_time(plan)
