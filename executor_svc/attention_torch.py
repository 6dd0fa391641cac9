"""Paged attention by torch alone: the bit-invariant fallback, and the plain path that people normally write.

`TorchAttention` computes each query by itself, from operations whose shapes depend on that query's position only, on
one thread (matrix products split their sums over threads), so that its bits depend on nothing else. `PlainAttention`
gathers a row's context and calls scaled_dot_product_attention, whose sums depend on the chunk; it is there to be
compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from executor_svc.attention import Done, Event, KVShape, Planned
from executor_svc.attention_pool import allocate, check_blocks, check_bytes, check_columns, check_heads, check_table
from executor_svc.step_plan import StepPlan

DONE = Done()


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a plan: its queries first..last-1, and the pool blocks of its context of `end` tokens."""

    first: int
    last: int
    end: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A checked step. `written` are the tokens whose KV is stored, `block` and `place` where to."""

    tokens: int
    rows: tuple[Row, ...]
    written: torch.Tensor
    block: torch.Tensor
    place: torch.Tensor


class TorchAttention:
    """The reference over one pool."""

    name = "torch"
    bit_invariant = True

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.pool = allocate(shape)
        self._bytes = self.pool.view(shape.blocks, -1).view(torch.uint8)

    def describe(self) -> str:
        """See AttentionBackend."""
        return f"attention={self.name}-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"

    def plan(self, step: StepPlan) -> Planned:
        """See AttentionBackend. ValueError: the step reaches outside of the pool or the table."""
        check_columns(step, self.shape)
        check_table(step, self.shape)
        size = self.shape.block_tokens
        rows = []
        for i in range(step.rows):
            end = int(step.context_tokens[i])
            entries = step.block_table[step.table_rows[i], : -(-end // size)]
            first, last = int(step.query_start[i]), int(step.query_start[i + 1])
            rows.append(Row(first, last, end, torch.from_numpy(entries.astype("int64"))))
        slots = torch.from_numpy(step.write_slots)
        written = torch.nonzero(slots >= 0).flatten()
        return TorchPlan(step.tokens, tuple(rows), written, slots[written] // size, slots[written] % size)

    def write_kv(self, planned: Planned, layer: int, k: torch.Tensor, v: torch.Tensor) -> Event:
        """See AttentionBackend."""
        plan = _plan(planned)
        for index, x in ((0, k), (1, v)):
            check_heads(x, plan.tokens, self.shape.kv_heads, self.shape.head_size)
            self.pool[:, layer, index][plan.block, plan.place] = x[plan.written].to(self.shape.dtype)
        return DONE

    def attend(self, planned: Planned, layer: int, q: torch.Tensor, out: torch.Tensor) -> Event:
        """See AttentionBackend."""
        plan = _plan(planned)
        check_heads(q, plan.tokens, q.shape[1], self.shape.head_size)
        check_heads(out, plan.tokens, q.shape[1], self.shape.head_size)
        if q.shape[1] % self.shape.kv_heads:
            raise ValueError(f"{q.shape[1]} query heads do not divide over {self.shape.kv_heads} KV heads")
        with single_thread() if self.bit_invariant else nullcontext():
            for row in plan.rows:
                if row.last > row.first:
                    k, v = (self._context(row, layer, index) for index in (0, 1))
                    self._attend_row(q[row.first : row.last], k, v, out[row.first : row.last])
        return DONE

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> Event:
        """See AttentionBackend."""
        check_blocks(sources, self.shape)
        check_blocks(targets, self.shape)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._bytes[target].copy_(self._bytes[source])
        return DONE

    def read_blocks(self, blocks: torch.Tensor, into: torch.Tensor) -> Event:
        """See AttentionBackend."""
        check_blocks(blocks, self.shape)
        check_bytes(into, len(blocks), self.shape)
        for i, block in enumerate(blocks.tolist()):
            into[i].copy_(self._bytes[block])
        return DONE

    def write_blocks(self, blocks: torch.Tensor, source: torch.Tensor) -> Event:
        """See AttentionBackend."""
        check_blocks(blocks, self.shape)
        check_bytes(source, len(blocks), self.shape)
        for i, block in enumerate(blocks.tolist()):
            self._bytes[block].copy_(source[i])
        return DONE

    def _context(self, row: Row, layer: int, index: int) -> torch.Tensor:
        """Keys (0) or values (1) of a row's context: float32 `[kv_heads, end, head_size]`."""
        held = self.pool[row.blocks, layer, index].flatten(0, 1)[: row.end]
        return held.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)

    def _attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Queries `[n, heads, head_size]` at the end of their context, one after another."""
        kv_heads, end, size = k.shape
        queries = (q * (1.0 / math.sqrt(size))).unflatten(1, (kv_heads, -1))
        for i in range(len(q)):
            seen = end - len(q) + i + 1
            # Copies, so that strides and alignment too depend on the position only.
            keys, values = k[:, :seen].clone(), v[:, :seen].clone()
            weights = torch.bmm(queries[i].clone(), keys.transpose(1, 2)).softmax(dim=-1)
            out[i] = torch.bmm(weights, values).flatten(0, 1)


class PlainAttention(TorchAttention):
    """Gather and scaled_dot_product_attention, row by row. Not bit-invariant."""

    name = "plain"
    bit_invariant = False

    def _attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        bias = causal_lower_right(len(q), k.shape[1])
        heads = scaled_dot_product_attention(
            *(q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)),
            attn_mask=bias if len(q) > 1 else None,
            enable_gqa=q.shape[1] != k.shape[0],
        )
        out.copy_(heads[0].transpose(0, 1))


@contextmanager
def single_thread() -> Iterator[None]:
    """torch computes on one thread meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _plan(planned: Planned) -> TorchPlan:
    if not isinstance(planned, TorchPlan):
        raise TypeError("the step was planned by another backend")
    return planned
