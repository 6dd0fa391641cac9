"""Measured rates: what a step costs, learned from the steps that ran.

The step-time model is time = base + per_row * rows + per_token * tokens + per_context * context tokens, fitted by
least squares over the newest steps, coefficients kept at or above zero. Steps with and without a prefill have a
window each: in a long run of decodes, where rows and tokens are one and the same, what a prompt costs is not lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from executor_svc.step_plan import StepPlan
from jitney.snapshot import Rates

_WINDOW = 128
"""Steps of each kind."""
_REFIT_EVERY = 32
_MAX_RATE = 10**12  # a token that seems to cost nothing


@dataclass(frozen=True, slots=True)
class FixedRates:
    """Rates that do not change: for the simulator, and for a clock without meaning."""

    rates: Rates

    def observe(self, plan: StepPlan, step_us: int) -> None:
        """Learns nothing."""

    def current(self) -> Rates:
        """The rates given."""
        return self.rates


class MeasuredRates:
    """Learns from each step's time."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._samples = np.zeros((2, _WINDOW, 5))
        self._seen = [0, 0]  # without and with a prefill
        self._rates = Rates(block_bytes=block_bytes)

    def observe(self, plan: StepPlan, step_us: int) -> None:
        """A step that took so long."""
        row = (1.0, plan.rows, plan.tokens, float(plan.context_tokens.sum()), float(step_us))
        kind = int(plan.tokens > plan.rows)
        self._samples[kind, self._seen[kind] % _WINDOW] = row
        self._seen[kind] += 1
        if sum(self._seen) % _REFIT_EVERY == 0:
            self._refit()

    def current(self) -> Rates:
        """What is known; zeros until enough steps ran."""
        return self._rates

    def _refit(self) -> None:
        kept = [window[: min(seen, _WINDOW)] for window, seen in zip(self._samples, self._seen, strict=True)]
        samples = np.concatenate(kept)
        found = np.zeros(4)
        active = [0, 1, 2, 3]
        while active:  # drop negative coefficients, one at a time
            solved = np.linalg.lstsq(samples[:, active], samples[:, 4], rcond=None)[0]
            if solved.min() >= 0:
                found[active] = solved
                break
            active.pop(int(solved.argmin()))
        base, per_row, per_token, per_context = (found * 1000).tolist()
        self._rates = Rates(
            block_bytes=self._block_bytes,
            prefill_tokens_per_s=min(int(1e9 / per_token), _MAX_RATE) if per_token > 0 else 0,
            step_base_ns=int(base),
            step_per_row_ns=int(per_row),
            step_per_token_ns=int(per_token),
            step_per_context_token_ps=int(per_context * 1000),
        )
