"""Priorities, as given by the clients."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from jitney.columns import I64, RunningTable, WaitingTable
from jitney.snapshot import PRIORITY_RANGE, Snapshot
from scheduler_svc.policies.base import Parameter, Policy, Ranking


class Priority(Policy):
    """By priority, equal ones by arrival. A waiting request takes the place of running ones of lower priority when
    rows or blocks are short; what it waits for inherits its priority.

    With aging a request rises by one for each so much time that it has waited for its row, at most to the highest
    priority there is. Without it, low priorities starve while higher ones fill the machine.
    """

    name: ClassVar[str] = "priority"
    summary: ClassVar[str] = "By priority, then arrival; a higher one preempts running lower ones."
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("aging_us_per_level", "Waiting that raises a request by one; 0: never", 0, 3_600_000_000, 0),
    )
    waiting_columns: ClassVar[tuple[str, ...]] = ("arrival_us", "priority")
    tables: ClassVar[tuple[str, ...]] = ()

    def rank(self, snapshot: Snapshot, memory: bytes) -> Ranking:
        """Classes are priorities, the highest first."""
        run, wait, aging = snapshot.running, snapshot.waiting, self.value("aging_us_per_level")
        running, waiting = run.priority.astype(np.int64), wait.priority.astype(np.int64)
        wake_at_us = 0
        if aging:
            waited = np.maximum(snapshot.now_us - wait.arrival_us, 0)
            waiting = _raised(waiting, waited // aging)
            running = _raised(running, np.maximum(run.admitted_us - run.arrival_us, 0) // aging)
            rises = waiting < PRIORITY_RANGE[1]
            if rises.any():
                wake_at_us = snapshot.now_us + int((aging - waited % aging)[rises].min())
        return Ranking((run.arrival_us,), (wait.arrival_us,), -running, -waiting, wake_at_us)

    def says(self, snapshot: Snapshot, table: RunningTable | WaitingTable, row: int, ranking: Ranking) -> str:
        """Its priority, as given and as it counts."""
        classes = ranking.waiting_class if table is snapshot.waiting else ranking.running_class
        given, counts = int(table.priority[row]), -int(classes[row]) if classes is not None else 0
        aged = f", which counts as {counts} by now" if counts != given else ""
        return f"its priority is {given}{aged}, " + super().says(snapshot, table, row, ranking)


def _raised(priority: I64, levels: I64) -> I64:
    raised: I64 = np.minimum(priority + np.minimum(levels, 1 << 16), PRIORITY_RANGE[1])
    return raised
