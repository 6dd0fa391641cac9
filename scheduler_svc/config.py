"""Configuration of the scheduler: what every service has, and nothing else. Policy and budgets come with each
snapshot, so that any replica decides alike."""

from __future__ import annotations

from dataclasses import dataclass

from jitney.serving.config import ServingConfig

SERVICE = "scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServingConfig):
    """Decides, each step, what runs, what boards and what leaves."""
