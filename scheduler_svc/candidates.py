"""What the cache already holds of waiting requests, and which ones to look up next."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jitney.columns import I64, U64
from jitney.snapshot import MAX_CANDIDATES, Snapshot


class Hits(NamedTuple):
    """Device blocks of a request's prefix that are there; of these, those that nobody holds; the running row that is
    computing what follows, 0 if none is; the blocks behind them in the CPU tier and on the SSD; and whether it was
    looked up at all."""

    blocks: int = 0
    unheld: int = 0
    owner: int = 0
    cpu: int = 0
    ssd: int = 0
    known: bool = False


NO_HITS = Hits()
"""Of a request that was not looked up: planned as a total miss, and loads what there is where that pays."""


class HitsOf:
    """Of each candidate, by request id. A prefix whose owner is not among `running` any more is a miss."""

    def __init__(self, snapshot: Snapshot, running: U64) -> None:
        self._table = snapshot.candidates
        self._running = running
        self._place = {id_: row for row, id_ in enumerate(self._table.id.tolist())}

    def __getitem__(self, request: int) -> Hits:
        row = self._place.get(request)
        if row is None:
            return NO_HITS
        table, owner = self._table, 0
        if table.pending_blocks[row] > 0:
            named = table.pending_owner[row]
            owner = int(named) if np.count_nonzero(self._running == named) else 0
        return Hits(
            int(table.device_hit_blocks[row]),
            int(table.unheld_hit_blocks[row]),
            owner,
            int(table.cpu_hit_blocks[row]),
            int(table.ssd_hit_blocks[row]),
            known=True,
        )


def next_candidates(snapshot: Snapshot, order: I64, boarded: int) -> U64:
    """The next requests to look up: the first of `order` behind the ones that boarded."""
    return snapshot.waiting.id[order[boarded : boarded + MAX_CANDIDATES]]
