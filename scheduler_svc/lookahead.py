"""Who ends soon, and who takes the row then: the executor boards a substitute at the very boundary at which a row
ends, without a decision.

A row that reaches its max_tokens is *certain* to end, and when. Any other may end by a stop token: with a median of m
tokens still to come it does so within s steps in about s * ln 2 / m of all cases. Substitutes are named while rows are
what is short and the blocks left over suffice for them, as many as rows are expected to end (one standard deviation
more, since a row that stays empty costs more than a reservation), and at least one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np

from jitney.columns import I64, PrefetchColumns, SubstituteColumns
from jitney.snapshot import HorizonKind, LowerTiers, Snapshot
from scheduler_svc.admission import Boarding, board
from scheduler_svc.budget import Budget, Reserve
from scheduler_svc.horizon import Horizon
from scheduler_svc.loading import LoadCosts
from scheduler_svc.running import RunningRows

LN2_PERMILLE = 693
LEAST_REMAINING_TOKENS = 4
"""Median of what is still to come for a row that is past its predicted length."""
_ANY = 1 << 40
PREFETCH_AHEAD = 8
"""How many requests behind those that board or stand by may have their blocks read from the SSD."""
PREFETCH_US = 500_000
"""Reads for prefetching take at most so long, those that wait already included."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Rows that end within the horizon early enough for another to run in their place."""

    certain: int
    likely_permille: int

    @property
    def expected(self) -> int:
        """How many substitutes that calls for."""
        if self.likely_permille == 0:
            return self.certain
        return self.certain + max(-(-(self.likely_permille + isqrt(1000 * self.likely_permille)) // 1000), 1)


def soon_free(rows: RunningRows, tokens: I64) -> int:
    """Blocks of rows that reach their last token in the step that gives them `tokens` [R], and need none for it."""
    ends = (tokens > 0) & (rows.growth == 0) & (rows.planned + tokens >= rows.final)
    return int(rows.private[ends].sum()) if np.count_nonzero(ends) else 0


def ends_within(rows: RunningRows, tokens: I64, horizon: Horizon) -> Ends:
    """Of `rows` [R] that compute `tokens` [R] in the first step. A row that certainly ends in the last step leaves none
    for another. An event ends the other kind of horizon, so that there only the first step is looked at."""
    steps = horizon.steps if horizon.kind is HorizonKind.STEPS else 1
    runs = (tokens > 0) & (rows.planned + tokens >= rows.known)
    left = rows.final - rows.planned - tokens
    certain = runs & (left < steps - 1)
    median = np.where(rows.p50 >= 0, rows.p50 - rows.answered, left // 4)
    median = np.maximum(median, np.maximum(rows.answered // 4, LEAST_REMAINING_TOKENS))
    chance = np.minimum(np.maximum(steps * LN2_PERMILLE // median, 1), 1000)
    likely = runs & (left >= max(steps - 1, 1))
    return Ends(int(np.count_nonzero(certain)), int(chance[likely].sum()))


def substitutes(
    snapshot: Snapshot,
    order: I64,
    rows: RunningRows,
    boarding: Boarding,
    budget: Budget,
    reserve: Reserve,
    ends: Ends,
) -> Boarding:
    """The next of `order` behind `boarding`, which lacks rows, with the tokens and blocks that are left in `budget`; as
    many as `ends` calls for. `rows` are those that stay.

    Each takes the tokens of the row that it replaces, at least one, and its share of what is left; what it loads, it
    loads while it stands by.
    """
    if ends.expected == 0:
        return Boarding()
    behind = order[len(boarding.rows) :]
    count = min(ends.expected, len(behind), snapshot.settings.max_rows)
    room = Budget(tokens=_ANY, rows=count, blocks=budget.blocks - boarding.kept, coming=0)
    found = board(snapshot, behind, rows, room, reserve, closed=False).without_joiners()
    found.tokens = [1] * len(found.rows)
    budget.tokens = found.top_up(budget.tokens, snapshot.settings.chunk_cap_tokens)
    budget.blocks = room.blocks
    return found


def substitute_columns(snapshot: Snapshot, found: Boarding) -> SubstituteColumns:
    """As the decision tells it."""
    columns = found.columns(snapshot)
    return SubstituteColumns(
        id=columns.id, tokens=columns.tokens, blocks=columns.blocks, load_blocks=columns.load_blocks
    )


def prefetches(snapshot: Snapshot, order: I64, boards: list[int]) -> PrefetchColumns:
    """The first of `order`, but those that board, that have blocks on the SSD and will load them faster than they are
    computed, while the CPU tier has room and the time for reads lasts."""
    table, rates, costs = snapshot.candidates, snapshot.rates, LoadCosts.of(snapshot)
    if not rates.ssd_read_bytes_per_s or not rates.block_bytes or costs.copy_ns >= 1000 * costs.compute_us(0, 1):
        return PrefetchColumns()
    if snapshot.settings.lower_tiers is LowerTiers.NEVER or not np.count_nonzero(table.ssd_hit_blocks):
        return PrefetchColumns()
    on_ssd = {int(table.id[row]): int(table.ssd_hit_blocks[row]) for row in np.flatnonzero(table.ssd_hit_blocks)}
    ids, counts = [], []
    room, left_us = snapshot.cpu.free_blocks, PREFETCH_US - snapshot.ssd.queue_us
    behind = [row for row in order.tolist() if row not in boards][:PREFETCH_AHEAD]
    for id_ in snapshot.waiting.id[behind].tolist():
        blocks = on_ssd.get(id_, 0)
        if not blocks:
            continue
        read_us = blocks * costs.read_ns // 1000
        if blocks > room or read_us > left_us:
            break
        ids.append(id_)
        counts.append(blocks)
        room -= blocks
        left_us -= read_us
    return PrefetchColumns(id=np.array(ids, np.uint64), blocks=np.array(counts, np.int32))
