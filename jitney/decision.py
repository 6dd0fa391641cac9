"""What a scheduler tells an executor to do, as plain values and numpy columns.

Meaning of each field: `protos/jitney/scheduler/v1/scheduler.proto`. The codec turns it to and from the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from jitney.columns import (
    U64,
    AdmitColumns,
    PolicyColumnUpdates,
    PreemptColumns,
    PrefetchColumns,
    RunColumns,
    SubstituteColumns,
)
from jitney.snapshot import HorizonKind, PolicyMemory


class PreemptionMode(IntEnum):
    """What happens to a victim's blocks."""

    UNSPECIFIED = 0
    RECOMPUTE = 1
    SWAP_CPU = 2
    SWAP_SSD = 3


class WaitReason(IntEnum):
    """Why a request waits, or why a row sits out a step."""

    UNSPECIFIED = 0
    ROWS = 1
    BLOCKS = 2
    TOKENS = 3
    BEHIND = 4
    QUOTA = 5
    PREFIX = 6
    LOAD = 7
    BATCH = 8
    BOUND = 9


class RefusalReason(IntEnum):
    """Why a request is refused."""

    UNSPECIFIED = 0
    DEADLINE = 1
    QUOTA = 2
    NEVER_FITS = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that will not be served; `retry_after_us` 0 means do not retry."""

    id: int
    reason: RefusalReason
    limit: int
    value: int
    retry_after_us: int = 0


def _no_ids() -> U64:
    return np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Decision:
    """One step's decision. Equal snapshots give equal decisions, byte for byte on the wire."""

    incarnation: int = 0
    step: int = 0
    attempt: int = 0
    snapshot_digest: bytes = b""
    build: str = ""
    run: RunColumns = field(default_factory=RunColumns)
    admit: AdmitColumns = field(default_factory=AdmitColumns)
    preempt: PreemptColumns = field(default_factory=PreemptColumns)
    prefetch: PrefetchColumns = field(default_factory=PrefetchColumns)
    substitutes: SubstituteColumns = field(default_factory=SubstituteColumns)
    next_candidates: U64 = field(default_factory=_no_ids)
    coast_victims: U64 = field(default_factory=_no_ids)
    horizon_kind: HorizonKind = HorizonKind.STEPS
    horizon_steps: int = 1
    wake_at_us: int = 0
    waiting_reasons: tuple[tuple[WaitReason, int], ...] = ()
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    refusals: tuple[Refusal, ...] = ()
    policy_updates: PolicyColumnUpdates = field(default_factory=PolicyColumnUpdates)
    padding_rows: U64 = field(default_factory=_no_ids)
    chunk_cap_tokens: int = 0
    block_reserve: int = 0
    needed_blocks: int = 0
    skipped_load_blocks: int = 0
