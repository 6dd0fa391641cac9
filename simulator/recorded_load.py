"""A recorded load: what arrived when, how long its answers really were, and how fast the machine was.

The lengths are the model's secret: a policy sees max_tokens and what it predicts. Of a request that did not come to
its own end (aborted, refused, past its deadline, still running) the length is not known: it counts as at least what
was generated, and otherwise as the median of those that did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from executor_svc.live_request import LiveRequest
from executor_svc.step_plan import StepPlan, StepResult
from jitney.columns import I32
from jitney.snapshot import Outcome, Rates
from simulator.clock import VirtualClock
from simulator.model import StepTime, TimedModel
from simulator.observed import Life, Observed

END_TOKEN: Final = 0
VOCABULARY: Final = 50_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it is submitted again. Times are microseconds from the start of the log; deadlines from arrival."""

    id: int
    at_us: int
    prompt_ids: I32
    max_tokens: int
    output_tokens: int
    tenant: int
    endpoint: int
    priority: int
    features: int
    ttft_deadline_us: int
    deadline_us: int
    gives_up_after_us: int  # 0: it waits


def arrivals(observed: Observed) -> list[Arrival]:
    """The load of a log, in the order of arrival."""
    ended = [life.generated_tokens for life in observed.lives.values() if life.completed]
    usual = int(median(ended)) if ended else 64
    lives = sorted(observed.lives.values(), key=lambda life: (max(life.arrival_us, observed.first_us), life.id))
    return [_arrival(life, observed, usual) for life in lives if life.prompt_tokens > 0]


def _arrival(life: Life, observed: Observed, usual: int) -> Arrival:
    had = life.generated_at_first  # before the log began
    prompt = life.prompt_tokens + had
    length = life.generated_tokens if life.completed else max(life.generated_tokens, usual)
    room = observed.settings.context_tokens - prompt
    most = max(1, min(life.max_new_tokens - had if life.max_new_tokens else length, room))
    gave_up = life.outcome is Outcome.ABORTED
    return Arrival(
        id=life.id,
        at_us=max(0, life.arrival_us - observed.first_us),
        prompt_ids=_prompt(life, prompt, life.hit_blocks * observed.settings.block_tokens),
        max_tokens=most,
        output_tokens=max(1, min(length - had, most)),
        tenant=life.tenant,
        endpoint=life.endpoint,
        priority=life.priority,
        features=life.features,
        ttft_deadline_us=max(0, life.ttft_deadline_us - life.arrival_us),
        deadline_us=max(0, life.deadline_us - life.arrival_us),
        gives_up_after_us=max(1, life.ended_us - max(life.arrival_us, observed.first_us)) if gave_up else 0,
    )


def _prompt(life: Life, tokens: int, hit_tokens: int) -> I32:
    """Of that many tokens, of which the first `hit_tokens` are what other requests of the tenant begin with, too."""
    shared = min(hit_tokens, tokens - 1)
    at = np.arange(tokens, dtype=np.uint64)
    seed = np.where(at < shared, np.uint64(life.tenant + 1), np.uint64(life.id + (1 << 32)))
    mixed = (seed * np.uint64(0x9E3779B97F4A7C15)) ^ (at * np.uint64(0xC2B2AE3D27D4EB4F))
    return ((mixed >> np.uint64(17)) % np.uint64(VOCABULARY - 1)).astype(np.int32) + np.int32(1)


def step_time(observed: Observed) -> tuple[Rates, StepTime]:
    """The measured rates and the time of a step by them; fitted to the log's own steps if it has no rates."""
    rates = observed.rates if observed.rates.step_base_ns else _fitted(observed.samples, observed.rates)
    return rates, _StepTime(rates)


@dataclass(frozen=True, slots=True)
class _StepTime:
    rates: Rates

    def __call__(self, plan: StepPlan) -> int:
        rates = self.rates
        ns = rates.step_base_ns + rates.step_per_row_ns * plan.rows + rates.step_per_token_ns * plan.tokens
        ns += rates.step_per_context_token_ps * int(plan.context_tokens.sum()) // 1000
        return max(1, ns // 1000)


def _fitted(samples: Sequence[tuple[int, int, int]], rates: Rates) -> Rates:
    """Least squares over (rows, tokens, us); the slowest tenth are idle times and left out."""
    if not samples:
        return Rates(step_base_ns=10_000_000, step_per_token_ns=100_000)
    table = np.array(samples, np.float64)
    table = table[table[:, 2] <= np.quantile(table[:, 2], 0.9)]
    active = [0, 1, 2]
    found = np.zeros(3)
    design = np.column_stack((np.ones(len(table)), table[:, 0], table[:, 1]))
    while active:
        solved = np.linalg.lstsq(design[:, active], table[:, 2], rcond=None)[0]
        if solved.min() >= 0:
            found[active] = solved
            break
        active.pop(int(solved.argmin()))
    base, per_row, per_token = (int(1000 * value) for value in found)
    return Rates(
        block_bytes=rates.block_bytes,
        prefill_tokens_per_s=1_000_000_000 // per_token if per_token else 0,
        step_base_ns=base,
        step_per_row_ns=per_row,
        step_per_token_ns=per_token,
    )


class LengthModel(TimedModel):
    """Each request's answer ends where it ended in the log, whatever the policy."""

    def __init__(self, clock: VirtualClock, step_time_us: StepTime) -> None:
        super().__init__(clock)
        self._step_time_us = step_time_us
        self.running: Callable[[], Sequence[LiveRequest]] = lambda: ()
        self.lengths: dict[int, int] = {}

    def run(self, plan: StepPlan) -> tuple[StepResult, int]:
        """See TimedModel."""
        by_row = {request.table_row: request for request in self.running()}
        sampled = [by_row[int(plan.table_rows[row])] for row in plan.sample_rows.tolist()]
        ids = [self._next(request.id, request.generated + 1) for request in sampled]
        took_us = self._step_time_us(plan)
        return StepResult(plan.step, np.array(ids, np.int32), compute_us=took_us), took_us

    def _next(self, request: int, number: int) -> int:
        return END_TOKEN if number >= self.lengths[request] else 1 + (request * 31 + number) % (VOCABULARY - 1)
