"""How the native kernel's work is cut: into items that threads take one by one, the largest first.

The cut never changes a result: sums run over tiles of the context in a fixed order whoever computes them. Layout of
the arrays: `Item` and `Merge` in kernels/attention.h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from executor_svc.step_plan import StepPlan
from jitney.columns import I32, I64

TILE_TOKENS = 128
"""Positions of a tile: TILE in kernels/tile.h."""
ITEM_ROWS = 126
"""Query rows of an item, at most: so many share the keys and values of a tile. Half where that leaves threads idle."""
REGISTER_ROWS = 6
"""Query rows of a register tile: REGISTER_ROWS in kernels/tile.h."""
ITEMS_A_THREAD = 4
"""Below so many items a thread the work is cut finer."""


@dataclass(frozen=True, slots=True)
class Items:
    """`items` [n, 7]: row, first query, queries, first KV head, KV heads, tile (-1: all), slot. `merges` [m, 3]: row,
    first slot, parts. Room: `slots` parts, `max_rows` query rows of a head and `max_total` of all heads an item."""

    items: I32
    merges: I32
    slots: int
    max_rows: int
    max_total: int
    pairs: int  # of query and position: the work of one head


def cut(step: StepPlan, group: int, kv_heads: int, threads: int) -> Items:
    """Cuts a step for `group` query heads a KV head.

    Queries of a chunk go by dozens, one KV head an item. A single query (a decode) takes all its heads in one item,
    which reads whole lines of the pool; where that leaves threads idle, one head an item; then one tile an item.
    """
    counts, contexts = np.diff(step.query_start).astype(np.int64), step.context_tokens.astype(np.int64)
    wanted = ITEMS_A_THREAD * threads
    most = max(1, ITEM_ROWS // group)
    if -(-counts // most).sum() * kv_heads < wanted:
        most = -(-most // 2)
    size = -(-counts // np.maximum(1, -(-counts // most)))  # equal shares, in whole register tiles
    size += -size % (REGISTER_ROWS // math.gcd(REGISTER_ROWS, group))
    row, index = _spread(-(-counts // np.maximum(1, size)))
    first = index * size[row]
    queries = np.minimum(size[row], counts[row] - first)
    ends = contexts[row] - counts[row] + first + queries

    single = counts[row] == 1
    heads = np.where(single, kv_heads if int(np.where(single, 1, kv_heads).sum()) >= wanted else 1, 1)
    split = single & (ends > TILE_TOKENS) & (len(row) * kv_heads < wanted)
    parts = np.where(split, -(-ends // TILE_TOKENS), 1)

    piece, part = _spread(parts)
    in_parts = split[piece]
    slot = np.where(in_parts, np.cumsum(in_parts) - 1, 0)
    item, place = _spread(kv_heads // heads[piece])
    source = piece[item]
    work = np.where(in_parts[item], TILE_TOKENS, queries[source] * ends[source]) * heads[source]
    columns = (
        *(row[source], first[source], queries[source], place * heads[source], heads[source]),
        *(np.where(in_parts[item], part[item], -1), slot[item]),
    )
    begins = np.cumsum(np.where(split, parts, 0)) - parts
    merges = (row[split], begins[split], parts[split])
    return Items(
        items=np.stack(columns, axis=1)[np.argsort(-work, kind="stable")].astype(np.int32),
        merges=np.stack(merges, axis=1).astype(np.int32),
        slots=int(parts[split].sum()),
        max_rows=int(queries.max(initial=1)) * group,
        max_total=int((queries * heads).max(initial=1)) * group,
        pairs=int((queries * ends).sum()),
    )


class Cutter:
    """Cuts steps, and remembers the last one: while rows bring as many queries as before and no context enters a new
    tile, the items stay, in an order that may be a few positions off."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._items: Items | None = None

    def cut(self, step: StepPlan, group: int, kv_heads: int, threads: int) -> Items:
        """See cut; `pairs` may be those of the step that was cut."""
        tiles = (step.context_tokens - 1) // TILE_TOKENS
        key = (step.query_start.tobytes(), tiles.tobytes(), group, kv_heads, threads)
        if self._items is None or key != self._key:
            self._key, self._items = key, cut(step, group, kv_heads, threads)
        return self._items


def _spread(times: I64) -> tuple[I64, I64]:
    """Each index as often as `times` says, beside a count from 0 within it."""
    owner = np.repeat(np.arange(len(times)), times)
    starts = np.cumsum(times) - times
    return owner, np.arange(len(owner)) - starts[owner]
