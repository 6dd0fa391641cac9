"""How long a request takes that has the machine for itself, by the measured step times: nobody is faster."""

from __future__ import annotations

from typing import Final

import numpy as np

from jitney.columns import I64
from jitney.snapshot import Snapshot
from scheduler_svc.step_time import StepTime

_BITS: Final = 20
_PART: Final = 1 << _BITS  # of a microsecond: times are summed up in these, since shifting is faster than dividing
MOST_PARTS: Final = 1 << 42  # 4 s; a slower token or step counts as that, so that sums stay within 64 bits


def alone_us(snapshot: Snapshot, prompt: I64) -> tuple[I64, I64]:
    """Time [N] of computing so many tokens of a prompt, and then of each token of the answer, with no other row."""
    model, settings, speed = StepTime.of(snapshot.rates), snapshot.settings, snapshot.rates.prefill_tokens_per_s
    if not model.known:
        each = min(1_000_000 * _PART // speed, MOST_PARTS) if speed else 0
        return (prompt * each) >> _BITS, np.zeros(len(prompt), np.int64)
    row, token, context = (
        min(ns * _PART // scale, MOST_PARTS)
        for ns, scale in (
            (model.base_ns + model.per_row_ns, 1000),
            (model.per_token_ns, 1000),
            (model.per_context_ps, 1_000_000),
        )
    )
    steps = -(-prompt // min(settings.chunk_cap_tokens, settings.max_step_tokens))
    first = steps * row + prompt * token
    if context:
        first += (prompt * (steps + 1) >> 1) * context
    return first >> _BITS, (prompt * context + (row + token)) >> _BITS
