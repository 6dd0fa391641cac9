"""From logits to tokens on a device, by the rules of sampling.py, without asking the host for anything.

Random numbers are drawn on the host beforehand: they depend on (seed, choice, position) only. A step takes the
cheapest of three ways that serves all its rows: greedy alone; drawn without filters; filtered, which sorts each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from executor_svc.philox import uniform
from executor_svc.step_plan import MAX_LOGPROBS, SamplingRows, StepResult
from jitney.columns import I32


class Way(IntEnum):
    """What the rows of a step ask for, at most."""

    GREEDY = 0
    DRAWN = 1
    FILTERED = 2


def way_of(rows: SamplingRows) -> Way:
    """The cheapest way that serves all rows."""
    drawn = rows.temperature > 0.0
    if not drawn.any():
        return Way.GREEDY
    filtered = drawn & ((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0))
    return Way.FILTERED if filtered.any() else Way.DRAWN


COLUMNS: dict[str, np.dtype[np.generic]] = {
    "number": np.dtype(np.float64),
    "temperature": np.dtype(np.float32),
    "top_p": np.dtype(np.float32),
    "min_p": np.dtype(np.float32),
    "top_k": np.dtype(np.int32),
}
"""What `draw` needs of each row."""


def column_values(rows: SamplingRows) -> dict[str, np.ndarray]:
    """The values of COLUMNS."""
    return {
        "number": uniform(rows.seed, rows.choice, rows.position),
        "temperature": rows.temperature,
        "top_p": rows.top_p,
        "min_p": rows.min_p,
        "top_k": rows.top_k,
    }


@torch.inference_mode()
def draw(logits: torch.Tensor, columns: dict[str, torch.Tensor], way: Way) -> torch.Tensor:
    """One token int32 [S] for each row of float32 `[S, vocabulary]`."""
    first = logits.argmax(dim=1)
    if way is Way.GREEDY:
        return first.int()
    largest = logits.amax(dim=1, keepdim=True)
    temperature = columns["temperature"][:, None]
    likelihood = ((logits - largest) / torch.where(temperature > 0, temperature, 1.0)).exp()
    if way is Way.FILTERED:
        likelihood = _filtered(likelihood, columns)
    sums = likelihood.cumsum(dim=1, dtype=torch.float64)
    total = sums[:, -1:].contiguous()
    picked = torch.searchsorted(sums, columns["number"][:, None] * total, right=True)
    last = torch.searchsorted(sums, total)  # rounding met the end: the last one that adds anything
    picked = torch.where(picked < logits.shape[1], picked, last)
    greedy = (temperature <= 0) | ~largest.isfinite()
    return torch.where(greedy, first[:, None], picked).flatten().int()


def _filtered(likelihood: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    """Zero for what top_k, top_p and min_p leave out; equal ones rank by token id."""
    ranked, ids = likelihood.sort(dim=1, descending=True, stable=True)
    top_k, top_p = columns["top_k"][:, None], columns["top_p"][:, None]
    rank = torch.arange(likelihood.shape[1], device=likelihood.device)
    kept = (top_k <= 0) | (rank < top_k)
    sums = torch.where(kept, ranked, 0.0).cumsum(dim=1, dtype=torch.float64)
    before = sums - ranked
    kept &= (top_p >= 1.0) | (before < top_p * sums[:, -1:])
    kept &= ranked >= columns["min_p"][:, None]
    return torch.zeros_like(likelihood).scatter_(1, ids, torch.where(kept, ranked, 0.0))


@torch.inference_mode()
def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row's token [S], and of the most likely ones: ids int32 and values, both `[S, MAX_LOGPROBS]`."""
    total = logits.logsumexp(dim=1, keepdim=True)
    own = logits.gather(1, tokens[:, None].long()) - total
    values, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=1)
    return own.flatten(), ids.int(), values - total


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew, on the host, one entry for each sampled row."""

    tokens: I32
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


def result_of(step: int, drawn: Drawn, wanted: I32) -> StepResult:
    """With the log-probabilities that each row asked for, as sampling.py gives them."""
    asking = wanted >= 0
    if drawn.logprobs is None or not asking.any():
        return StepResult(step, drawn.tokens)
    own, ids, values = drawn.logprobs
    most = min(int(wanted.max()), ids.shape[1])
    outside = np.arange(most) >= wanted[:, None]
    return StepResult(
        step,
        drawn.tokens,
        np.where(asking, own, np.float32(np.nan)),
        np.where(outside, np.int32(-1), ids[:, :most]) if most else None,
        np.where(outside, np.float32(-np.inf), values[:, :most]) if most else None,
    )
