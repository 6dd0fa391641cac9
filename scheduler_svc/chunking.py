"""How the tokens of a step are dealt out: decodes first, then chunks of several prefills at once.

A prompt that is longer than one chunk is *long*. While others want tokens too, all long ones together get at most half
of what the decodes leave, so that short prompts get through beside any number of long ones; what nobody else took
goes back to them. No row ever gets more than the chunk cap, and all rows together never more than the budget, which
bounds the gap between two tokens of a decode.
"""

from __future__ import annotations

import numpy as np

from jitney.columns import I64
from scheduler_svc.running import Flags, RunningRows

LONG_SHARE_PERCENT = 50


def deal(rows: RunningRows, max_rows: int, max_tokens: int, chunk_cap: int, *, others_wait: bool) -> I64:
    """Tokens for each of `rows` [R], in their order; `others_wait`: requests without a row want tokens as well."""
    decodes = _first(rows.decodes, min(max_rows, max_tokens))
    tokens = decodes.astype(np.int64)
    taken = int(np.count_nonzero(decodes))
    prefills = _first((rows.wanted > 0) & ~rows.decodes, max_rows - taken)
    if not np.count_nonzero(prefills):
        return tokens
    left = max_tokens - taken
    long = prefills & (rows.wanted > chunk_cap)
    short = prefills & ~long
    shared = others_wait or bool(short.any())
    tokens += pour(np.where(long, chunk_cap, 0), long_share(left) if shared else left)
    tokens += pour(np.where(short, rows.wanted, 0), max_tokens - int(tokens.sum()))
    return tokens


def _first(chosen: Flags, most: int) -> Flags:
    """The first of the chosen, at most so many."""
    if np.count_nonzero(chosen) <= most:
        return chosen
    return chosen & (np.cumsum(chosen) <= most)


def long_share(left: int) -> int:
    """What long prompts may take of `left` tokens while others want some."""
    return -(-left * LONG_SHARE_PERCENT // 100)


def top_up(rows: RunningRows, tokens: I64, left: int, max_rows: int, chunk_cap: int, out: Flags) -> I64:
    """`tokens` [R] with the `left` ones added to the chunks that could be larger, or could not begin for the share.
    Not to rows that are `out` of this step [R], or that need a block which nobody has counted."""
    if left <= 0 or not np.count_nonzero(rows.wanted > tokens):
        return tokens
    begins = ~out & (rows.growth == 0) if rows.count <= max_rows else np.zeros(rows.count, np.bool_)
    more = np.where((tokens > 0) | begins, np.minimum(rows.wanted, chunk_cap) - tokens, 0)
    return tokens + pour(more, left)


def pour(wants: I64, left: int) -> I64:
    """Fills `wants` [R] one after another until nothing is left."""
    before = np.cumsum(wants) - wants
    filled: I64 = np.minimum(np.maximum(left - before, 0), wants)
    return filled
