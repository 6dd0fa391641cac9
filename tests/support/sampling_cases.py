"""Logits and settings of all kinds, and what may be drawn from them."""

from __future__ import annotations

import numpy as np

from executor_svc.step_plan import F32, SamplingRows

ROUNDING = 2e-6
"""Of likelihoods, and of what they sum up to."""


def may_be(logits: F32, token: int, number: float, temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether a token is the one that `number` picks, by sorting everything, or would be with other rounding.

    All filters keep the first so many of the ranking; edges of top_p and min_p that rounding can meet are tried.
    """
    likelihood = np.exp(((logits - logits.max()) / np.float32(temperature)).astype(np.float64))
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[:top_k] if top_k else order
    ranked = likelihood[order]
    sums = np.cumsum(ranked)
    least, most = 1, len(order)
    if top_p < 1.0:
        reached = np.searchsorted(sums, top_p * sums[-1] * np.array([1 - ROUNDING, 1 + ROUNDING])) + 1
        least, most = int(reached[0]), min(most, int(reached[1]))
    enough = [int((ranked >= min_p * edge).sum()) for edge in (1 + ROUNDING, 1 - ROUNDING)]
    least, most = min(least if top_p < 1.0 else most, max(enough[0], 1)), min(most, enough[1])
    kept = slice(least - 1, most)
    before = np.cumsum(ranked * (order < token))[kept]
    until = np.cumsum(ranked * (order <= token))[kept]
    target, slack = number * sums[kept], ROUNDING * sums[kept]
    rank = int(np.flatnonzero(order == token)[0]) if token in order else len(order)
    there = np.arange(least - 1, most) >= rank
    return bool((there & (before - slack <= target) & (target <= until + slack)).any())


def some_logits(generator: np.random.Generator, rows: int, vocabulary: int, spread: float) -> F32:
    """Rows of all kinds: with many ties, few values, zeros of both signs, some that cannot come."""
    logits = generator.normal(0, spread, (rows, vocabulary)).astype(np.float32)
    for row, kind in zip(logits, generator.integers(0, 6, rows), strict=True):
        if kind == 1:
            row[:] = np.round(row, 2)
        elif kind == 2:
            row[:] = np.round(row / 2)
        elif kind == 3:
            row[:] = np.copysign(np.float32(0), row)
        elif kind == 4:
            row[generator.integers(0, vocabulary, vocabulary // 2 + 1)] = -np.inf
            row[generator.integers(0, vocabulary)] = spread
        elif kind == 5:
            row[generator.integers(0, vocabulary, 3)] *= np.float32(1e30)
    return logits


def random_rows(generator: np.random.Generator, rows: int) -> SamplingRows:
    """Any mix of settings."""
    return SamplingRows(
        temperature=generator.choice([0.0, 0.0, 0.3, 1.0, 2.5], rows).astype(np.float32),
        top_p=generator.choice([0.3, 0.95, 1.0], rows).astype(np.float32),
        top_k=generator.choice([0, 1, 40], rows).astype(np.int32),
        min_p=generator.choice([0.0, 0.1], rows).astype(np.float32),
        seed=generator.integers(0, 2**64, rows, dtype=np.uint64),
        choice=generator.integers(0, 4, rows).astype(np.int32),
        position=generator.integers(0, 9000, rows).astype(np.int32),
        logprobs=generator.choice([-1, 0, 3, 20], rows).astype(np.int32),
    )
