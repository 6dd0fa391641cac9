"""What the cache already holds of waiting requests, and which ones to look up next."""

from __future__ import annotations

from typing import NamedTuple

from jitney.columns import I64, U64
from jitney.snapshot import MAX_CANDIDATES, Snapshot


class Hits(NamedTuple):
    """Device blocks of a request's prefix that are there; of these, those that nobody holds; the running row that is
    computing what follows, 0 if none is; and the blocks behind them in the CPU tier and on the SSD."""

    blocks: int = 0
    unheld: int = 0
    owner: int = 0
    cpu: int = 0
    ssd: int = 0


NO_HITS = Hits()
"""Of a request that was not looked up: planned as a total miss."""


def hits_by_request(snapshot: Snapshot, running: U64) -> dict[int, Hits]:
    """Of each candidate, by request id. A prefix whose owner is not among `running` any more is a miss."""
    table = snapshot.candidates
    if table.rows == 0:
        return {}
    pending = table.pending_blocks.tolist()
    owners = set(running.tolist()) if any(pending) else set()
    rows = zip(
        table.id.tolist(),
        table.device_hit_blocks.tolist(),
        table.unheld_hit_blocks.tolist(),
        pending,
        table.pending_owner.tolist(),
        table.cpu_hit_blocks.tolist(),
        table.ssd_hit_blocks.tolist(),
        strict=True,
    )
    return {
        id_: Hits(blocks, unheld, owner if ahead > 0 and owner in owners else 0, cpu, ssd)
        for id_, blocks, unheld, ahead, owner, cpu, ssd in rows
    }


def next_candidates(snapshot: Snapshot, order: I64, boarded: int) -> U64:
    """The next requests to look up: the first of `order` behind the ones that boarded."""
    return snapshot.waiting.id[order[boarded : boarded + MAX_CANDIDATES]]
