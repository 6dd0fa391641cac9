"""What was seen lately of how fast something goes, against what is told of it.

Rates that are told may be wrong, late, or of another time of day: a meter that forgets slowly, a fit over many steps, a
link that others use as well. Whatever is seen draws the estimate towards itself, the more the longer it took. With the
time the estimate goes back to what is told, half of the way (of the logarithm) in each FADES_US: a way that looked dear
is tried again then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from executor_svc.ports import CopyPort, CopyRates, Moved, RatesPort
from executor_svc.step_plan import StepPlan
from jitney.snapshot import Rates

FADES_US = 3_000_000
"""Without news, half of what was seen is forgotten."""
COPIES_DRAW_US = 50_000
PREFILLS_DRAW_US = 1_000_000
"""So long a time that is seen weighs as much as all before it. What a step's prefill took is known less well."""
_MOST_FACTOR = math.log(1000)
_MOST_RATE = 10**12
"""However wrong what is told may be."""


@dataclass(slots=True)
class Lately:
    """What to make of one rate, of anything a second."""

    draws_us: int
    _factor: float = 0.0  # logarithm of what was seen to what was told
    _at_us: int = 0  # when it was seen last

    def saw(self, amount: int, took_us: int, told: int, now_us: int) -> None:
        """So much took so long, where `told` was expected; 0: it is unknown, nothing is learned."""
        if amount <= 0 or took_us <= 0 or not told:
            return
        kept = math.exp2(-took_us / self.draws_us)
        seen = min(max(math.log(amount * 1e6 / took_us / told), -_MOST_FACTOR), _MOST_FACTOR)
        self._factor, self._at_us = kept * self._now(now_us) + (1 - kept) * seen, now_us

    def rate(self, told: int, now_us: int) -> int:
        """What is to be expected now."""
        return min(max(int(told * math.exp(self._now(now_us))), 1), _MOST_RATE) if told else 0

    def _now(self, now_us: int) -> float:
        return self._factor * math.exp2(-max(now_us - self._at_us, 0) / FADES_US)


class RatesLately:
    """RatesPort: what another one has learned, with the speed of the prefills that ran lately.

    A prefill takes what its step took beyond its share that is not the prefill's. What was seen stays until the next
    prefill: what is told was learned of older ones.
    """

    def __init__(self, told: RatesPort) -> None:
        self._told = told
        self._prefill = Lately(PREFILLS_DRAW_US)

    def observe(self, plan: StepPlan, step_us: int) -> None:
        """See RatesPort."""
        told, each = self._told.current(), np.diff(plan.query_start)
        prefill = int(each[each > 1].sum())
        rest_ns = told.step_base_ns + told.step_per_row_ns * plan.rows
        rest_ns += told.step_per_token_ns * (plan.tokens - prefill)
        rest_ns += told.step_per_context_token_ps * int(plan.context_tokens.sum()) // 1000
        if told.prefill_tokens_per_s:
            self._prefill.saw(prefill, step_us - rest_ns // 1000, told.prefill_tokens_per_s, 0)
        self._told.observe(plan, step_us)

    def current(self) -> Rates:
        """See RatesPort."""
        told = self._told.current()
        return replace(told, prefill_tokens_per_s=self._prefill.rate(told.prefill_tokens_per_s, 0))


class CopiesLately:
    """What copies cost, by what is told and by what was copied lately."""

    def __init__(self, copies: CopyPort) -> None:
        self._copies = copies
        self._moved = Moved()
        self._out, self._in = Lately(COPIES_DRAW_US), Lately(COPIES_DRAW_US)

    def rates(self, now_us: int) -> CopyRates:
        """As CopyPort tells them, corrected; waits in the same measure."""
        told, moved, before = self._copies.rates(), self._copies.moved(), self._moved
        self._moved = moved
        out, into = told.to_host_bytes_per_s, told.to_device_bytes_per_s
        self._out.saw(moved.out_bytes - before.out_bytes, moved.out_us - before.out_us, out, now_us)
        self._in.saw(moved.in_bytes - before.in_bytes, moved.in_us - before.in_us, into, now_us)
        out_now, in_now = self._out.rate(out, now_us), self._in.rate(into, now_us)
        return CopyRates(
            out_now,
            in_now,
            told.queue_us * into // in_now if in_now else told.queue_us,
            told.out_queue_us * out // out_now if out_now else told.out_queue_us,
        )
