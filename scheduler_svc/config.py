"""Configuration of the scheduler: what every service has, and a policy of the operator's own. Which policy decides, its
parameters and the budgets come with each snapshot, so that any replica decides alike."""

from __future__ import annotations

from dataclasses import dataclass

from jitney.serving.config import ServingConfig, option
from scheduler_svc.policies.custom import with_custom

SERVICE = "scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServingConfig):
    """Decides, each step, what runs, what boards and what leaves."""

    policy: str = option("", "A policy of your own, to be chosen like the built-in ones: path.py:ClassName")

    def validate(self) -> None:
        """The policy can be loaded."""
        ServingConfig.validate(self)
        with_custom(self.policy)
