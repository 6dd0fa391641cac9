"""The textbook's executor: one thread that computes a step, then decides, then computes the next.

The real loop runs it; only the model differs from the simulator's: a launch returns when the step is over, and its
result is looked at once the decision asked meanwhile has come and the cache has answered. So a decision costs its whole
time, and with a horizon of several steps whoever arrives or ends within it waits for the next decision.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from executor_svc.step_plan import StepPlan, StepResult
from jitney.snapshot import Settings
from simulator.cache import VirtualCache
from simulator.clock import VirtualClock
from simulator.model import StepTime, VirtualModel
from simulator.scheduler import VirtualScheduler
from simulator.simulation import Simulation, Watched


class TextbookModel(VirtualModel):
    """Overlaps with nothing."""

    scheduler: VirtualScheduler
    cache: VirtualCache

    def launch(self, plan: StepPlan) -> None:
        """Returns when the step is over; what arrives meanwhile has arrived then."""
        super().launch(plan)
        while not self._results:
            self._clock.wait(None)
        self._clock.ring()

    def poll(self) -> StepResult | None:
        """The result, once the decision and its batch are through."""
        if self.scheduler.unheard:
            self._clock.ring()  # the loop hears it in this very turn
            return None
        if self.scheduler.undecided or self.cache.unanswered:
            return None
        return super().poll()


def textbook(settings: Settings, pool_blocks: int, *, step_time_us: StepTime, decision_us: int) -> Simulation:
    """A simulation in which nothing overlaps and the cache costs no time."""

    def model(clock: VirtualClock) -> TextbookModel:
        return TextbookModel(clock, pool_blocks, settings.block_tokens, step_time_us=step_time_us)

    simulation = Simulation(settings, pool_blocks, scheduler_latency_us=decision_us, cache_latency_us=0, model=model)
    assert isinstance(simulation.model, TextbookModel)
    simulation.model.scheduler, simulation.model.cache = simulation.scheduler, simulation.cache
    return simulation


def applied_us(simulation: Simulation, watched: Watched) -> int:
    """When a completion is noticed if that happens at decisions only: at the first one that is not before it."""
    return next_us(simulation.scheduler.asked_us, watched.finished_us)


def next_us(times_us: Sequence[int], at_us: int) -> int:
    """The first of the rising times that is not before `at_us`; `at_us` itself if there is none."""
    index = bisect.bisect_left(times_us, at_us)
    return times_us[index] if index < len(times_us) else at_us
