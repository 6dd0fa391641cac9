"""What one forward pass computes, and what comes back: the only values that pass between loop and model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I32, I64, U64

F32 = NDArray[np.float32]
MAX_LOGPROBS = 20
STEPS_IN_FLIGHT = 2
"""Of a model that queues steps: one that is computed, and one behind it."""
NO_COPIES: I64 = np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each sampled row draws, [S] entries each.

    A draw is keyed by (seed, choice, position, draw number), never by what else is in the batch.
    """

    temperature: F32  # 0: greedy
    top_p: F32
    top_k: I32  # 0: all
    min_p: F32
    seed: U64
    choice: I32
    position: I32  # index of the new token in the request (prompt + generated before it)
    logprobs: I32  # top k wanted, -1: none

    @staticmethod
    def greedy(rows: int) -> SamplingRows:
        """The most likely token for each row, no log-probabilities."""
        zeros = np.zeros(rows, np.int32)
        return SamplingRows(
            temperature=np.zeros(rows, np.float32),
            top_p=np.ones(rows, np.float32),
            top_k=zeros,
            min_p=np.zeros(rows, np.float32),
            seed=np.zeros(rows, np.uint64),
            choice=zeros,
            position=zeros,
            logprobs=np.full(rows, -1, np.int32),
        )


def drawn_by(rows: I64) -> I32:
    """Token ids that stand for what these rows of the step before draw, which the host need not know yet."""
    named: I32 = (-1 - rows).astype(np.int32)
    return named


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over R rows and T tokens, rows one after another.

    `block_table` is the loop's own table of pool block ids, [table rows, max blocks]; `table_rows` picks from it, so
    that nothing is copied. It must not change while the step runs, but for entries behind the planned context.
    """

    step: int
    token_ids: I32  # [T]; negative ones: see drawn_by
    positions: I32  # [T]
    write_slots: I64  # [T] block id * block_tokens + offset; -1: the token's KV is not written (it is there)
    query_start: I32  # [R + 1] first token of each row, then T
    context_tokens: I32  # [R] KV length that the row's last token attends to, itself included
    block_table: I32
    table_rows: I32  # [R]
    sample_rows: I32  # [S] rows whose last token yields a new one, rising
    sampling: SamplingRows
    copies: I64 = field(default_factory=lambda: NO_COPIES)  # [C, 2] whole blocks, from and to: before anything else

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.table_rows)

    @property
    def tokens(self) -> int:
        """Number of tokens computed."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """New tokens of the plan's `sample_rows`, in that order. `top_*` are [S, k] for the largest k asked, or None."""

    step: int
    token_ids: I32
    logprobs: F32 | None = None
    top_ids: I32 | None = None
    top_logprobs: F32 | None = None
    compute_us: int = 0
