"""What every attention backend on the CPU shares: the pool's memory, and the check of a step before it touches it."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import torch

from executor_svc.attention import KVShape
from executor_svc.step_plan import StepPlan
from jitney.errors import InvalidRequest

DTYPES = (torch.float16, torch.float32)
MAX_HEAD_SIZE = 256


def allocate(shape: KVShape) -> torch.Tensor:
    """The pool, page-aligned and untouched: `[blocks, layers, 2, block_tokens, kv_heads, head_size]`.

    Raises ValueError where the shape is none that the backends compute, InvalidRequest where there is no room for it.
    """
    if shape.dtype not in DTYPES:
        raise ValueError(f"KV type {shape.dtype} is not one of {', '.join(map(str, DTYPES))}")
    if shape.head_size % 8 or not 0 < shape.head_size <= MAX_HEAD_SIZE:
        raise ValueError(f"head size {shape.head_size} is not a multiple of 8 up to {MAX_HEAD_SIZE}")
    if min(shape.blocks, shape.layers, shape.block_tokens, shape.kv_heads) < 1:
        raise ValueError(f"the pool is empty: {shape}")
    try:
        room = mmap.mmap(-1, shape.blocks * shape.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        what = f"--pool-blocks {shape.blocks} of {shape.block_bytes} bytes each do not fit into memory: {error}"
        raise InvalidRequest(what, field="pool_blocks", value=shape.blocks) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # fewer misses of the address cache; for shared memory it is seldom allowed
            room.madvise(mmap.MADV_HUGEPAGE)
    dimensions = (shape.blocks, shape.layers, 2, shape.block_tokens, shape.kv_heads, shape.head_size)
    return torch.frombuffer(room, dtype=shape.dtype).view(dimensions)


def check_columns(step: StepPlan, shape: KVShape) -> None:
    """ValueError unless the step's columns agree with each other, slots are in the pool and rows in the table."""
    rows, tokens = step.rows, step.tokens
    if len(step.query_start) != rows + 1 or step.query_start[0] != 0 or step.query_start[-1] != tokens:
        raise ValueError(f"query_start does not divide {tokens} tokens into {rows} rows")
    if len(step.context_tokens) != rows or len(step.positions) != tokens or len(step.write_slots) != tokens:
        raise ValueError("columns of the step differ in length")
    if tokens == 0:
        return
    counts = np.diff(step.query_start)
    before = step.context_tokens - counts
    if counts.min() < 0 or before.min() < 0:
        raise ValueError("a row has fewer tokens of context than queries")
    if (step.positions != np.arange(tokens) + np.repeat(before - step.query_start[:-1], counts)).any():
        raise ValueError("positions do not end at their row's context")
    limit = shape.blocks * shape.block_tokens
    if step.write_slots.min() < -1 or step.write_slots.max() >= limit:
        raise ValueError(f"a write slot is outside of -1 to {limit - 1}")
    if step.table_rows.min() < 0 or step.table_rows.max() >= len(step.block_table):
        raise ValueError(f"a table row is outside of 0 to {len(step.block_table) - 1}")
    used = -(-step.context_tokens // shape.block_tokens)
    if used.max() > step.block_table.shape[1]:
        raise ValueError(f"a context needs {used.max()} blocks, the table has {step.block_table.shape[1]}")


def check_table(step: StepPlan, shape: KVShape) -> None:
    """ValueError unless every table entry inside a row's context is a block of the pool."""
    used = -(-step.context_tokens // shape.block_tokens)
    blocks = step.block_table[step.table_rows, : used.max(initial=0)]
    outside = (np.arange(blocks.shape[1]) < used[:, None]) & ((blocks < 0) | (blocks >= shape.blocks))
    if outside.any():
        row = int(outside.any(axis=1).argmax())
        raise ValueError(f"row {row} names a block outside of 0 to {shape.blocks - 1}")


def check_blocks(blocks: torch.Tensor, shape: KVShape) -> None:
    """ValueError unless all are int64 ids of blocks of the pool."""
    if blocks.dtype != torch.int64 or blocks.dim() != 1:
        raise ValueError("block ids must be int64 [n]")
    if len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= shape.blocks):
        raise ValueError(f"a block is outside of 0 to {shape.blocks - 1}")


def check_heads(x: torch.Tensor, tokens: int, heads: int, head_size: int) -> None:
    """ValueError unless x is float32 `[>= tokens, heads, head_size]` with adjacent elements in a token's row."""
    if x.dtype != torch.float32 or x.dim() != 3 or x.shape[0] < tokens or x.shape[1:] != (heads, head_size):
        raise ValueError(f"expected float32 [{tokens}, {heads}, {head_size}], not {x.dtype} {list(x.shape)}")
    if x.stride(2) != 1 or x.stride(1) != head_size:
        raise ValueError("the elements of a token's row must be adjacent")


def check_bytes(x: torch.Tensor, blocks: int, shape: KVShape) -> None:
    """ValueError unless x is contiguous uint8 `[blocks, block_bytes]`."""
    if x.dtype != torch.uint8 or x.shape != (blocks, shape.block_bytes) or not x.is_contiguous():
        raise ValueError(f"expected contiguous uint8 [{blocks}, {shape.block_bytes}], not {x.dtype} {list(x.shape)}")
