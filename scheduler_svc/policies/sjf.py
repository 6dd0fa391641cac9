"""Shortest job first, by the predicted length of the answer."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from jitney.columns import I32, I64, RunningTable, WaitingTable
from jitney.snapshot import Snapshot
from scheduler_svc.policies.base import Parameter, Policy, Ranking


class Sjf(Policy):
    """By arrival plus so much time for each token that is predicted still to come.

    That is shortest first, with aging built in: one token more weighs as much as having arrived so much later, so that
    a request waits only behind those that came before its own sum, and nothing starves. The order never changes by
    itself. A preempted request counts what is left of it, one past its prediction a quarter of what it has generated.
    """

    name: ClassVar[str] = "sjf"
    summary: ClassVar[str] = (
        "By the predicted output length that is left; waiting makes up for length, so nothing starves."
    )
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("aging_us_per_token", "Waiting that makes up for one token more; 0: by arrival", 0, 10**7, 50_000),
        Parameter("unknown_tokens", "Predicted length where nothing is known", 1, 1 << 20, 256),
    )
    reads_lengths: ClassVar[tuple[str, ...]] = ("waiting",)
    waiting_columns: ClassVar[tuple[str, ...]] = ("arrival_us", "predicted_p50", "generated_tokens")
    tables: ClassVar[tuple[str, ...]] = ()

    def rank(self, snapshot: Snapshot, memory: bytes) -> Ranking:
        """By (arrival + what is left * aging, id)."""
        run, wait = snapshot.running, snapshot.waiting
        most = run.max_new_tokens.astype(np.int64) - run.generated_tokens
        return Ranking(
            (run.arrival_us + self._left_us(run.predicted_p50, run.generated_tokens, most),),
            (wait.arrival_us + self._left_us(wait.predicted_p50, wait.generated_tokens, wait.new_tokens),),
        )

    def says(self, snapshot: Snapshot, table: RunningTable | WaitingTable, row: int, ranking: Ranking) -> str:
        """Tokens to come, and its age."""
        keys = ranking.waiting if table is snapshot.waiting else ranking.running
        aging = self.value("aging_us_per_token")
        left = (int(keys[0][row]) - int(table.arrival_us[row])) // aging if aging else 0
        predicted = f"about {left} tokens of it are still to come, " if aging else ""
        return predicted + super().says(snapshot, table, row, ranking)

    def _left_us(self, predicted: I32, generated: I32, most: I64 | I32) -> I64:
        """Tokens still to come, as waiting time."""
        whole = np.where(predicted < 0, self.value("unknown_tokens"), predicted).astype(np.int64)
        left: I64 = np.minimum(np.where(whole > generated, whole - generated, generated // 4 + 1), most)
        left *= self.value("aging_us_per_token")
        return left
