"""Turns chosen rows and token counts into a StepPlan: the last thing before a launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_svc.blocks import DeviceBlocks
from executor_svc.live_request import LiveRequest
from executor_svc.registry import Registry
from executor_svc.step_plan import SamplingRows, StepPlan


def fit(registry: Registry, blocks: DeviceBlocks, request: LiveRequest, tokens: int) -> int:
    """How many of `tokens` the row can compute now: what it wants, as far as its blocks and the grant reach.

    Takes granted blocks where the row's own do not suffice. 0: it sits out this step.
    """
    if request.joined or registry.loading[request.slot]:
        return 0
    computed = int(registry.computed_tokens[request.slot])
    tokens = min(tokens, request.length - computed)
    while computed + tokens > len(request.blocks) * blocks.block_tokens:
        if blocks.take_granted(request) is None:
            return max(0, len(request.blocks) * blocks.block_tokens - computed)
        registry.held_blocks[request.slot] = len(request.blocks)
    return tokens


def build_plan(
    step: int,
    registry: Registry,
    blocks: DeviceBlocks,
    rows: Sequence[LiveRequest],
    tokens: Sequence[int],
    padding: Sequence[LiveRequest] = (),
) -> StepPlan:
    """The plan of a step in which each row computes its next so many tokens (at least 1, and they fit).

    `padding` are ended rows that compute their last token again, for nothing: it is neither written nor sampled.
    """
    running = len(rows)
    rows = [*rows, *padding]
    tokens = [*tokens, *[1] * len(padding)]
    count = len(rows)
    slots = np.fromiter((r.slot for r in rows), np.int64, count)
    table_rows = np.fromiter((r.table_row for r in rows), np.int32, count)
    sealed = np.fromiter((r.sealed for r in rows), np.int64, count)
    lengths = np.fromiter((r.length for r in rows), np.int64, count)
    take = np.asarray(tokens, np.int64)
    start = registry.computed_tokens[slots].astype(np.int64)
    start[running:] -= 1
    end = start + take
    query_start = np.zeros(count + 1, np.int64)
    np.cumsum(take, out=query_start[1:])
    row_of = np.repeat(np.arange(count), take)
    positions = np.arange(query_start[-1]) - query_start[row_of] + start[row_of]
    block_index = positions // blocks.block_tokens
    pool_block = blocks.table[table_rows[row_of], block_index].astype(np.int64)
    slot_of = pool_block * blocks.block_tokens + positions % blocks.block_tokens
    # A sealed block is never written: the last token of a wholly cached prompt only queries.
    slot_of[(block_index < sealed[row_of]) | (row_of >= running)] = -1
    sample = np.flatnonzero(end[:running] == lengths[:running]).astype(np.int32)
    drawn = slots[sample]
    return StepPlan(
        step=step,
        token_ids=np.concatenate([r.tokens[s:e] for r, s, e in zip(rows, start, end, strict=True)]),
        positions=positions.astype(np.int32),
        write_slots=slot_of,
        query_start=query_start.astype(np.int32),
        context_tokens=end.astype(np.int32),
        block_table=blocks.table,
        table_rows=table_rows,
        sample_rows=sample,
        sampling=SamplingRows(
            choice=np.zeros(len(sample), np.int32),
            position=lengths[sample].astype(np.int32),
            **{name: column[drawn] for name, column in registry.sampling.items()},
        ),
    )
