"""Requests that a decision gives a row, and rows that it takes away: what Apply makes batches of."""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.live_request import LiveRequest
from jitney.block_ops import Tier


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets a row, or stands by for one, and how many blocks it loads from lower tiers at most."""

    request: LiveRequest
    load_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Victim:
    """A row that is preempted; `tier` is where its blocks go, None: nowhere."""

    request: LiveRequest
    tier: Tier | None = None
