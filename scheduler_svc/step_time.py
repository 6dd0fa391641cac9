"""How long a step takes, by the executor's measured model, and what fits into a target for the time per token.

    time = base + per row * rows + per token * tokens + per context token * tokens of KV read

A row that decodes gets one token a step, so the time per token that a client sees is the time of a step. The target
bounds the rows that may board, and with the rows there are the tokens of the step: what the decodes leave of it goes
to prefills. Integers only; a model that is not known yet bounds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jitney.snapshot import Rates, Snapshot
from scheduler_svc.running import RunningRows

LEAST_PREFILL_TOKENS = 16
"""Prefills get so many tokens of a step even where the target cannot be met, so that they end some day."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The model, in nanoseconds; `per_context_ps` in picoseconds."""

    base_ns: int
    per_row_ns: int
    per_token_ns: int
    per_context_ps: int

    @classmethod
    def of(cls, rates: Rates) -> StepTime:
        """As the executor measured it."""
        return cls(rates.step_base_ns, rates.step_per_row_ns, rates.step_per_token_ns, rates.step_per_context_token_ps)

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self.base_ns + self.per_row_ns + self.per_token_ns + self.per_context_ps > 0

    def ns(self, rows: int, tokens: int, context: int) -> int:
        """A step of so many rows and tokens that reads `context` tokens of KV."""
        return (
            self.base_ns + self.per_row_ns * rows + self.per_token_ns * tokens + self.per_context_ps * context // 1000
        )

    def rows_within(self, target_ns: int, context: int) -> int | None:
        """The most decodes, each over `context` tokens, that a step of `target_ns` holds; None: any number."""
        each_ps = 1000 * (self.per_row_ns + self.per_token_ns) + self.per_context_ps * context
        return max(target_ns - self.base_ns, 0) * 1000 // each_ps if each_ps else None

    def tokens_within(self, target_ns: int, rows: int, context: int) -> int | None:
        """The most tokens that `rows` over `context` tokens in all compute within `target_ns`; None: any number."""
        left = max(target_ns - self.ns(rows, 0, context), 0)
        return left // self.per_token_ns if self.per_token_ns else None


@dataclass(frozen=True, slots=True)
class StepSize:
    """The most rows that may hold a row, and the most tokens of the step."""

    rows: int
    tokens: int


def step_size(snapshot: Snapshot, rows: RunningRows) -> StepSize:
    """What the configuration allows, and the target with the running `rows`: at least one row, and at least a token
    for each decode beside LEAST_PREFILL_TOKENS."""
    settings, model = snapshot.settings, StepTime.of(snapshot.rates)
    if not settings.target_tpot_us or not model.known:
        return StepSize(settings.max_rows, settings.max_step_tokens)
    target_ns = settings.target_tpot_us * 1000
    context = int(rows.planned.sum())
    most_rows = model.rows_within(target_ns, _mean(rows.planned if rows.count else snapshot.waiting.tokens))
    most_tokens = model.tokens_within(target_ns, rows.count, context)
    least = int(rows.decodes.sum()) + LEAST_PREFILL_TOKENS
    return StepSize(
        settings.max_rows if most_rows is None else min(max(most_rows, 1), settings.max_rows),
        settings.max_step_tokens if most_tokens is None else min(max(most_tokens, least), settings.max_step_tokens),
    )


def _mean(tokens: NDArray[np.integer]) -> int:
    return int(tokens.sum(dtype=np.int64)) // len(tokens) if len(tokens) else 0
