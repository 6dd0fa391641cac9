"""First come, first served."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from jitney.columns import I64
from jitney.snapshot import Snapshot
from scheduler_svc.policies.base import Policy, smallest


class Fcfs(Policy):
    """By arrival. A preempted request keeps its arrival, and with it its place before all that came later."""

    name: ClassVar[str] = "fcfs"
    summary: ClassVar[str] = "By arrival; priorities, deadlines and lengths play no part."
    waiting_columns: ClassVar[tuple[str, ...]] = ("arrival_us",)

    def order_running(self, snapshot: Snapshot) -> I64:
        """By (arrival, id)."""
        table = snapshot.running
        return np.lexsort((table.id, table.arrival_us))

    def first_waiting(self, snapshot: Snapshot, count: int) -> I64:
        """By (arrival, id)."""
        return smallest(snapshot.waiting.arrival_us, snapshot.waiting.id, count)
