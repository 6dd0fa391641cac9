"""Static batching: a batch is collected when nothing runs, and runs to its end together; kept to be measured against.

Nobody boards while a row of the batch runs or is ending, and a batch starts with what is waiting as soon as nothing
runs. All of it boards in one step, each row with at least one token. What ends early is dropped, or, as padding, holds
its row and its blocks and is computed on until the batch has ended or a running row needs a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jitney.columns import I64, U64
from jitney.decision import WaitReason
from jitney.snapshot import Batching, Snapshot
from scheduler_svc.admission import Boarding, Wait, board
from scheduler_svc.budget import Budget, Reserve
from scheduler_svc.displacement import Displacement
from scheduler_svc.running import RunningRows

_ANY = 1 << 40


@dataclass(frozen=True, slots=True)
class Batch:
    """`static`: rows board together. `open`: somebody may board in this step. `padding`: ended rows that are computed
    while the batch runs."""

    static: bool
    open: bool
    padding: U64

    @classmethod
    def of(cls, snapshot: Snapshot) -> Batch:
        """What the situation says of the batch that runs."""
        static = snapshot.settings.batching is not Batching.CONTINUOUS
        runs, ending = snapshot.running.rows > 0, snapshot.ending.rows > 0
        pads = snapshot.settings.batching is Batching.STATIC_PADDED and runs
        padding = snapshot.ending.id if pads else np.empty(0, np.uint64)
        if len(padding):  # a row that has computed a prefix for others seals it when it leaves
            padding = padding[~np.isin(padding, snapshot.running.waits_for)]
        return cls(static, not static or not (runs or ending), padding)

    def board(
        self,
        snapshot: Snapshot,
        order: I64,
        rows: RunningRows,
        budget: Budget,
        reserve: Reserve,
        *,
        closed: bool,
        displacement: Displacement,
    ) -> Boarding:
        """`admission.board`, or the whole of a new batch, or nobody."""
        if not self.static:
            return board(snapshot, order, rows, budget, reserve, closed=closed, displacement=displacement)
        if not self.open:
            held = rows.count + snapshot.ending.rows
            return Boarding(wait=Wait(int(order[0]), WaitReason.BATCH, held, 0)) if len(order) else Boarding()
        tokens = budget.tokens
        budget.rows, budget.tokens = min(budget.rows, tokens), _ANY
        boarding = board(snapshot, order, rows, budget, reserve, closed=closed)
        boarding.tokens = [min(count, 1) for count in boarding.tokens]
        budget.tokens = tokens - sum(boarding.tokens)
        return boarding
