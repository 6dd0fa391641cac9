"""Deadlines for the first token and for the whole answer, the earliest that can still be met first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64, PolicyColumnUpdates, RunningTable, WaitingTable
from jitney.decision import Refusal, RefusalReason
from jitney.snapshot import Snapshot
from scheduler_svc.alone import alone_us
from scheduler_svc.arrivals import MAX_MARKS, arrivals, marked
from scheduler_svc.lookups import rows_with
from scheduler_svc.policies.base import Key, Parameter, Policy, Ranking, policy_columns

NEVER: Final = 1 << 62


class Deadline(Policy):
    """Earliest feasible deadline first: on the first token until it is there, and on the whole answer.

    Feasible is what the step-time model says can be done in time if it were alone from now on; of work that cannot
    make it any more the rest comes last, gives its place to work that can, or is refused if it never ran. A request
    without a deadline counts as due a while after its arrival, and is never hopeless.

    A request's memory: a, 1 once its first token was there. The policy's own: when which id was new, since the
    waiting table has no room for arrivals beside both deadlines.
    """

    name: ClassVar[str] = "deadline"
    summary: ClassVar[str] = "Earliest deadline first among those that can be met; hopeless work last, or refused."
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("refuse_hopeless", "1: refuse waiting work that cannot make it any more; 0: do it last", 0, 1, 0),
        Parameter("best_effort_ms", "When a request without a deadline counts as due", 1, 3_600_000, 30_000),
        Parameter("output_tokens", "Length of an answer, for a waiting request's deadline", 1, 1 << 20, 64),
    )
    reads_lengths: ClassVar[tuple[str, ...]] = ("running",)
    waiting_columns: ClassVar[tuple[str, ...]] = ("ttft_deadline_us", "deadline_us")
    tables: ClassVar[tuple[str, ...]] = ("histograms",)

    def rank(self, snapshot: Snapshot, memory: bytes) -> Ranking:
        """Classes: 0 feasible, 1 hopeless. By (due, id)."""
        run, wait, now_us = snapshot.running, snapshot.waiting, snapshot.now_us
        begun, ran = policy_columns(snapshot)[0] != 0, _ran(snapshot)
        marks = marked(memory, wait.id, now_us, self._best_effort_us // (MAX_MARKS // 2))
        prompt = np.maximum(run.prompt_tokens.astype(np.int64) - run.computed_tokens - run.in_flight_tokens, 0)
        expected = np.where(run.predicted_p50 >= 0, run.predicted_p50, self.value("output_tokens"))
        left = np.minimum(np.maximum(expected - run.generated_tokens, 1), run.max_new_tokens)
        running = self._due(
            snapshot, prompt, left, run.ttft_deadline_us, run.generated_tokens > 0, run.deadline_us, run.arrival_us
        )
        left = np.minimum(wait.new_tokens, self.value("output_tokens"))
        waiting = self._due(
            snapshot,
            _uncached(snapshot),
            left,
            wait.ttft_deadline_us,
            begun,
            wait.deadline_us,
            arrivals(marks, wait.id, now_us),
        )
        fresh = (run.generated_tokens > 0) & (run.policy_a == 0)
        ones = np.ones(int(np.count_nonzero(fresh)), np.int64)
        latest = waiting.latest_us[~waiting.hopeless]
        soon = latest[latest < NEVER]
        return Ranking(
            (running.due_us,),
            (waiting.due_us,),
            running.hopeless.astype(np.int64),
            waiting.hopeless.astype(np.int64),
            wake_at_us=int(soon.min()) + 1 if len(soon) else 0,
            memory=marks.tobytes(),
            updates=PolicyColumnUpdates(id=run.id[fresh], a=ones, b=np.zeros(len(ones), np.int64)),
            refusals=self._refusals(snapshot, waiting, ran) if self.value("refuse_hopeless") else (),
        )

    def says(self, snapshot: Snapshot, table: RunningTable | WaitingTable, row: int, ranking: Ranking) -> str:
        """When it is due, and whether that can be."""
        waits = table is snapshot.waiting
        due = int((ranking.waiting if waits else ranking.running)[0][row])
        classes = ranking.waiting_class if waits else ranking.running_class
        late = classes is not None and int(classes[row]) > 0
        return f"it is due in {(due - snapshot.now_us) // 1000} ms" + (", which cannot be met any more" if late else "")

    @property
    def _best_effort_us(self) -> int:
        return self.value("best_effort_ms") * 1000

    def _due(
        self,
        snapshot: Snapshot,
        prompt: I64,
        left: Key,
        ttft_us: I64,
        begun: NDArray[np.bool_],
        total_us: I64,
        arrival_us: I64,
    ) -> Due:
        """Of requests that have `prompt` tokens to compute and `left` to generate."""
        first, token = alone_us(snapshot, prompt)
        ttft = np.where((ttft_us > 0) & ~begun, ttft_us, NEVER)
        total = np.where(total_us > 0, total_us, NEVER)
        whole = first + left * token
        latest = np.minimum(ttft - first, total - whole)
        due = np.minimum(ttft, total)
        none = due == NEVER
        due[none] = arrival_us[none] + self._best_effort_us
        latest[none] = NEVER
        return Due(due, latest, latest < snapshot.now_us, np.where(ttft - first > latest, whole, first))

    def _refusals(self, snapshot: Snapshot, waiting: Due, ran: NDArray[np.bool_]) -> tuple[Refusal, ...]:
        """Of hopeless requests that were looked up in the cache and have never run."""
        looked = rows_with(snapshot.waiting.id, snapshot.candidates.id)
        rows = looked[looked >= 0]
        rows = np.sort(rows[waiting.hopeless[rows] & ~ran[rows]])
        left = waiting.latest_us + waiting.needed_us - snapshot.now_us
        return tuple(
            Refusal(id_, RefusalReason.DEADLINE, limit=max(limit, 0), value=value)
            for id_, limit, value in zip(
                snapshot.waiting.id[rows].tolist(), left[rows].tolist(), waiting.needed_us[rows].tolist(), strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class Due:
    """Of each request, in microseconds: `latest_us`: when it must have begun; `needed_us`: what it takes from there."""

    due_us: I64
    latest_us: I64
    hopeless: NDArray[np.bool_]
    needed_us: I64


def _uncached(snapshot: Snapshot) -> I64:
    """Tokens [W] that the cache does not have, at least one; a request that was not looked up is a total miss."""
    tokens = snapshot.waiting.tokens.astype(np.int64)
    rows = rows_with(snapshot.waiting.id, snapshot.candidates.id)
    known = rows >= 0
    tokens[rows[known]] -= snapshot.candidates.device_hit_blocks[known] * snapshot.settings.block_tokens
    return np.maximum(tokens, 1)


def _ran(snapshot: Snapshot) -> NDArray[np.bool_]:
    ran: NDArray[np.bool_] = snapshot.waiting.preemptions > 0
    ran[snapshot.waiting_policy.policy_row] = True
    return ran
