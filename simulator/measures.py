"""What a run was like for its clients: times, fairness and goodput, out of what was observed.

Only requests that arrived while it was observed count. Fairness is measured where it can be: over windows of five
seconds, between the tenants that had a request waiting all the while, in prompt tokens computed plus tokens
generated, over weight. Goodput counts completed requests within the targets for time to first token, for time per
token, and within their own deadlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.observed import Life, Observed

NO_TIME = -1.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request has to keep to count as good."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 200.0


@dataclass(frozen=True, slots=True)
class Measures:
    """Times in milliseconds, -1 where there are none; rates per second."""

    requests: int
    completed: int
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    completion_ms_mean: float
    completion_ms_p50: float
    completion_ms_p99: float
    preemptions: int
    service_gap_tokens: float  # the largest difference in service between two backlogged tenants in a window
    jain: float  # mean over the windows of Jain's index; 1: all alike, also where there were no two to compare
    goodput_per_s: float
    tokens_per_s: float


def measure(observed: Observed, targets: Targets) -> Measures:
    """Of a whole run."""
    lives = [life for life in observed.lives.values() if life.arrival_us >= observed.first_us]
    done = [life for life in lives if life.completed]
    ttft = [life.first_token_us - life.arrival_us for life in lives if life.first_token_us]
    tpot = [_tpot_us(life) for life in done if life.generated_tokens > 1]
    whole = [life.ended_us - life.arrival_us for life in done]
    good = sum(_is_good(life, targets) for life in done)
    seconds = max(1, observed.last_us - observed.first_us) / 1e6
    tokens = sum(life.generated_tokens - life.generated_at_first for life in observed.lives.values())
    return Measures(
        requests=len(lives),
        completed=len(done),
        ttft_ms_p50=_percentile_ms(ttft, 50),
        ttft_ms_p99=_percentile_ms(ttft, 99),
        tpot_ms_p50=_percentile_ms(tpot, 50),
        tpot_ms_p99=_percentile_ms(tpot, 99),
        completion_ms_mean=round(float(np.mean(whole)) / 1000, 3) if whole else NO_TIME,
        completion_ms_p50=_percentile_ms(whole, 50),
        completion_ms_p99=_percentile_ms(whole, 99),
        preemptions=observed.preemptions,
        service_gap_tokens=round(max((max(w.service) - min(w.service) for w in observed.windows), default=0.0), 1),
        jain=round(float(np.mean([jain(w.service) for w in observed.windows])), 4) if observed.windows else 1.0,
        goodput_per_s=round(good / seconds, 3),
        tokens_per_s=round(tokens / seconds, 2),
    )


def jain(service: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all are alike, 1/n when one has all."""
    values = np.asarray(service, np.float64)
    squares = float((values**2).sum()) * len(values)
    return float(values.sum()) ** 2 / squares if squares else 1.0


def _tpot_us(life: Life) -> float:
    return (life.ended_us - life.first_token_us) / (life.generated_tokens - 1)


def _is_good(life: Life, targets: Targets) -> bool:
    first_us = life.first_token_us - life.arrival_us
    slow = life.generated_tokens > 1 and _tpot_us(life) > 1000 * targets.tpot_ms
    late = 0 < life.ttft_deadline_us < life.first_token_us or 0 < life.deadline_us < life.ended_us
    return first_us <= 1000 * targets.ttft_ms and not slow and not late


def _percentile_ms(times_us: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(times_us, percent)) / 1000, 3) if times_us else NO_TIME
