"""First come, first served."""

from __future__ import annotations

from typing import ClassVar

from jitney.snapshot import Snapshot
from scheduler_svc.policies.base import Policy, Ranking


class Fcfs(Policy):
    """By arrival. A preempted request keeps its arrival, and with it its place before all that came later."""

    name: ClassVar[str] = "fcfs"
    summary: ClassVar[str] = "By arrival; priorities, deadlines and lengths play no part."
    waiting_columns: ClassVar[tuple[str, ...]] = ("arrival_us",)
    tables: ClassVar[tuple[str, ...]] = ()

    def rank(self, snapshot: Snapshot, memory: bytes) -> Ranking:
        """By (arrival, id)."""
        return Ranking((snapshot.running.arrival_us,), (snapshot.waiting.arrival_us,))
