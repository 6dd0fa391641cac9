"""Why requests wait and rows sit out, counted by reason."""

from __future__ import annotations

import numpy as np

from jitney.columns import I64
from jitney.decision import WaitReason
from scheduler_svc.admission import Boarding
from scheduler_svc.preemption import Relief
from scheduler_svc.running import RunningRows

SHARED_BY_ALL = (WaitReason.ROWS, WaitReason.TOKENS, WaitReason.BATCH)
"""What the first that waits lacks, all behind it lack too; otherwise they stand behind it."""


def count_reasons(
    waiting: int, held_back: int, boarding: Boarding, rows: RunningRows, tokens: I64, relief: Relief
) -> tuple[tuple[WaitReason, int], ...]:
    """Of `waiting` requests that neither board nor are refused, `held_back` of them by a quota, and of running `rows`
    that get no `tokens` [R] but are not victims. Sorted by reason."""
    counts = [0] * len(WaitReason)
    counts[WaitReason.QUOTA] += held_back
    waiting -= held_back
    if boarding.wait is not None:
        shared = boarding.wait.reason in SHARED_BY_ALL
        counts[boarding.wait.reason] += waiting if shared else 1
        counts[WaitReason.BEHIND] += 0 if shared else waiting - 1
    if np.count_nonzero(tokens) < rows.count:
        counts[WaitReason.PREFIX] += int(np.count_nonzero(rows.joined))
        counts[WaitReason.LOAD] += int(np.count_nonzero(rows.loading & ~rows.joined))
        counts[WaitReason.BLOCKS] += int(np.count_nonzero(relief.starved))
        idle = (rows.wanted > 0) & (tokens == 0) & ~relief.starved
        idle[relief.victims] = False
        counts[WaitReason.TOKENS] += int(np.count_nonzero(idle))
    return tuple((reason, counts[reason]) for reason in WaitReason if counts[reason])


def row_reason(position: int, rows: RunningRows, relief: Relief) -> WaitReason:
    """Why a running row that gets no tokens sits out."""
    if rows.joined[position]:
        return WaitReason.PREFIX
    if rows.loading[position]:
        return WaitReason.LOAD
    return WaitReason.BLOCKS if relief.starved[position] else WaitReason.TOKENS
