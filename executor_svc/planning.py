"""Turns chosen rows and token counts into a StepPlan: the last thing before a launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_svc.blocks import DeviceBlocks
from executor_svc.live_request import LiveRequest
from executor_svc.registry import Registry, slots_of
from executor_svc.step_plan import SamplingRows, StepPlan, drawn_by
from jitney.columns import I64


def fit(registry: Registry, blocks: DeviceBlocks, rows: Sequence[LiveRequest], slots: I64, wanted: I64) -> I64:
    """How many of `wanted` [R] tokens each row can compute now: as far as its blocks and the grant reach.

    Takes granted blocks where a row's own do not suffice. At most 0: it sits out this step.
    """
    computed, length = registry.planned(slots)
    tokens: I64 = np.minimum(wanted, length - computed)
    tokens[(registry.waits_for[slots] != 0) | (registry.loading[slots] != 0)] = 0
    room = registry.held_blocks[slots].astype(np.int64) * blocks.block_tokens - computed
    for i in [i for i, request in enumerate(rows) if request.id in blocks.guarded] if blocks.guarded else ():
        room[i] = len(rows[i].blocks) * blocks.block_tokens - computed[i]
        tokens[i] = min(tokens[i], rows[i].prompt_tokens - computed[i])
    for i in np.flatnonzero(tokens > room).tolist():
        request = rows[i]
        while tokens[i] > room[i]:
            if blocks.take_granted(request) is None:
                tokens[i] = max(0, int(room[i]))
                break
            registry.held_blocks[request.slot] = len(request.blocks)
            room[i] += blocks.block_tokens
    return tokens


def build_plan(
    step: int,
    registry: Registry,
    blocks: DeviceBlocks,
    rows: Sequence[LiveRequest],
    slots: I64,
    tokens: I64,
    padding: Sequence[LiveRequest] = (),
    behind: I64 | None = None,
) -> StepPlan:
    """The plan of a step in which each row, at its slot, computes its next so many tokens (at least 1, and they fit).

    `behind` are the slots of the step in flight, by its rows: this one is queued behind it, and begins with no copies.
    None: no step is in flight. `padding` are ended rows that compute their last token again, for nothing: it is neither
    written nor sampled.
    """
    copies = blocks.take_forks()
    running, take = len(rows), tokens
    if padding:
        rows = [*rows, *padding]
        slots, take = slots_of(rows), np.concatenate((tokens, np.ones(len(padding), np.int64)))
    count = len(rows)
    table_rows = np.array([r.table_row for r in rows], np.int32)
    sealed = np.array([r.sealed for r in rows], np.int64)
    start, lengths = registry.planned(slots)
    start[running:] -= 1
    lengths[running:] = 0  # padding draws nothing
    end = start + take
    query_start = np.zeros(count + 1, np.int64)
    np.cumsum(take, out=query_start[1:])
    row_of = np.repeat(np.arange(count), take)
    positions = start if len(row_of) == count else np.arange(len(row_of)) - query_start[row_of] + start[row_of]
    block_index, offset = np.divmod(positions, blocks.block_tokens)
    pool_block = blocks.table[table_rows[row_of], block_index].astype(np.int64)
    slot_of = pool_block * blocks.block_tokens + offset
    # A sealed block is never written: the last token of a wholly cached prompt only queries.
    # Nor is a block that several rows hold.
    slot_of[(block_index < sealed[row_of]) | (row_of >= running) | ~blocks.writable[pool_block]] = -1
    sample = np.flatnonzero(end[:running] == lengths[:running]).astype(np.int32)
    drawn = slots[sample]
    token_ids = registry.newest_token[slots][row_of]  # right for each row that computes its newest token alone
    for i in np.flatnonzero((take > 1) | (end != lengths)).tolist():
        token_ids[query_start[i] : query_start[i + 1]] = rows[i].tokens[start[i] : end[i]]
    if behind is not None:
        known = registry.prompt_tokens[slots] + registry.generated_tokens[slots]
        drawn_now = np.flatnonzero(start == known)
        row_before = np.empty(len(registry.id), np.int64)
        row_before[behind] = np.arange(len(behind))
        token_ids[query_start[drawn_now]] = drawn_by(row_before[slots[drawn_now]])
    return StepPlan(
        step=step,
        token_ids=token_ids,
        positions=positions.astype(np.int32),
        write_slots=slot_of,
        query_start=query_start.astype(np.int32),
        context_tokens=end.astype(np.int32),
        block_table=blocks.table,
        table_rows=table_rows,
        sample_rows=sample,
        sampling=SamplingRows(
            position=lengths[sample].astype(np.int32),
            **{name: column[drawn] for name, column in registry.sampling.items()},
        ),
        copies=copies,
    )
