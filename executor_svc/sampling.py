"""From logits to tokens. Each row is drawn from its own logits and its own random number, whatever is beside it.

Greedy rows take the first of the largest logits. Other rows: temperature; the top_k most likely tokens; of those, the
fewest whose probabilities reach top_p; of those, the ones at least min_p times as likely as the first. Equal logits
rank by token id. One random number, keyed by (seed, choice, position, draw), then picks along the sum of what is
left, in the order of token ids. Log-probabilities are those of the model: before temperature and filters.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from executor_svc.kernels.elementwise import Elementwise, NativeElementwise
from executor_svc.philox import uniform
from executor_svc.sampling_native import NativeSampler
from executor_svc.step_plan import F32, SamplingRows, StepResult
from jitney.columns import I32, I64


class Sampler(Protocol):
    """Draws the new tokens of a step."""

    def draw(self, step: int, logits: torch.Tensor | None, rows: SamplingRows) -> StepResult:
        """One token for each row of float32 `[S, vocabulary]`; None: no row samples."""


def select_sampler(elementwise: Elementwise) -> Sampler:
    """The native one beside native kernels."""
    return NativeSampler(elementwise) if isinstance(elementwise, NativeElementwise) else NumpySampler(elementwise)


class NumpySampler:
    """Row by row: what the rules mean, and what runs where the native kernels do not."""

    def __init__(self, elementwise: Elementwise) -> None:
        self._elementwise = elementwise

    def draw(self, step: int, logits: torch.Tensor | None, rows: SamplingRows) -> StepResult:
        """See Sampler."""
        if logits is None or len(logits) == 0:
            return StepResult(step, np.empty(0, np.int32))
        tokens = np.empty(len(logits), np.int32)
        greedy = rows.temperature <= 0.0
        if greedy.any():
            first = torch.empty(len(logits), dtype=torch.int64)
            self._elementwise.argmax(logits, first)
            tokens[:] = first.numpy()
        values = logits.numpy()
        drawn = np.flatnonzero(~greedy)
        numbers = uniform(rows.seed[drawn], rows.choice[drawn], rows.position[drawn])
        for row, number in zip(drawn.tolist(), numbers.tolist(), strict=True):
            tokens[row] = draw_row(
                values[row],
                temperature=float(rows.temperature[row]),
                top_k=int(rows.top_k[row]),
                top_p=float(rows.top_p[row]),
                min_p=float(rows.min_p[row]),
                number=number,
            )
        return _with_logprobs(step, tokens, values, rows.logprobs)


def draw_row(logits: F32, *, temperature: float, top_k: int, top_p: float, min_p: float, number: float) -> int:
    """One token of `[vocabulary]`; `temperature` > 0, `number` in [0, 1)."""
    largest = logits.max()
    if not math.isfinite(largest):
        return int(np.argmax(logits))
    likelihood = np.exp((logits - largest) / np.float32(temperature))
    kept: I64 | None = None
    if 0 < top_k < len(logits):
        kept = top_ids(logits, top_k)
    if top_p < 1.0:
        kept = _nucleus(logits, likelihood, kept, top_p)
    if min_p > 0.0:
        at_least = np.float32(min_p)
        kept = np.flatnonzero(likelihood >= at_least) if kept is None else kept[likelihood[kept] >= at_least]
    if kept is None:
        return _pick(likelihood, number)
    kept = np.sort(kept)
    return int(kept[_pick(likelihood[kept], number)])


def top_ids(logits: F32, count: int) -> I64:
    """Ids of the `count` largest, most likely first; equal ones by id."""
    at_least = torch.topk(torch.from_numpy(logits), count).values[-1].item()
    return _ranked(logits, np.flatnonzero(logits >= np.float32(at_least)))[:count]


def _ranked(logits: F32, ids: I64) -> I64:
    return ids[np.argsort(-logits[ids], kind="stable")]


def _nucleus(logits: F32, likelihood: F32, kept: I64 | None, top_p: float) -> I64:
    """The fewest of the most likely tokens that reach `top_p` of the sum over `kept` (ranked; None: all)."""
    if kept is None:
        total = float(likelihood.sum(dtype=np.float64))
        # All tokens below this share together are less than 1 - top_p: the nucleus lies among the others.
        share = max(0.0, 1.0 - top_p) * total / (2.0 * len(likelihood))
        kept = _ranked(logits, np.flatnonzero(likelihood >= share))
    else:
        total = float(likelihood[kept].sum(dtype=np.float64))
    sums = np.cumsum(likelihood[kept], dtype=np.float64)
    return kept[: int(np.searchsorted(sums, top_p * total, side="left")) + 1]


def _pick(likelihood: F32, number: float) -> int:
    sums = np.cumsum(likelihood, dtype=np.float64)
    index = int(np.searchsorted(sums, number * sums[-1], side="right"))
    if index < len(sums):
        return index
    return int(np.searchsorted(sums, sums[-1], side="left"))  # rounding met the end: the last one that adds anything


def _with_logprobs(step: int, tokens: I32, values: F32, wanted: I32) -> StepResult:
    """Adds log-probabilities for rows that ask: NaN, id -1 and -inf stand where a row asked for nothing."""
    asking = np.flatnonzero(wanted >= 0).tolist()
    if not asking:
        return StepResult(step, tokens)
    logprobs = np.full(len(tokens), np.nan, np.float32)
    most = min(int(wanted.max()), values.shape[1])
    ids = np.full((len(tokens), most), -1, np.int32)
    likely = np.full((len(tokens), most), -np.inf, np.float32)
    for row in asking:
        total = _log_sum(values[row])
        logprobs[row] = float(values[row, tokens[row]]) - total
        count = min(int(wanted[row]), most)
        if count > 0:
            likelier = values[row] if math.isfinite(total) else np.nan_to_num(values[row], nan=-np.inf, neginf=-np.inf)
            ids[row, :count] = best = top_ids(likelier, count)
            likely[row, :count] = values[row, best].astype(np.float64) - total
    return StepResult(step, tokens, logprobs, ids if most else None, likely if most else None)


def _log_sum(logits: F32) -> float:
    """NaN where a logit is NaN, or none is finite."""
    largest = logits.max()
    if not math.isfinite(largest):
        return math.nan
    return float(largest) + math.log(np.exp(logits - largest).sum(dtype=np.float64))
