"""Attention as one writes it first: gather the context of every row, then torch's own attention, layer by layer.

The measure that the paged kernels are held against; for decoding rows of equal context only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor_svc.attention import Done, Event, KVShape
from executor_svc.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Where each row's new KV goes, and its blocks `[rows, blocks of its context]`."""

    slots: torch.Tensor
    blocks: torch.Tensor
    context_tokens: int


class GatherAttention:
    """The calls of an AttentionBackend that a decoding step makes."""

    name = "gather-sdpa"
    bit_invariant = False

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.pool = torch.zeros(
            shape.blocks, shape.layers, 2, shape.block_tokens, shape.kv_heads, shape.head_size, dtype=shape.dtype
        )

    def plan(self, step: StepPlan) -> GatherPlan:
        """One index for all layers."""
        context = int(step.context_tokens[0])
        if step.tokens != step.rows or (step.context_tokens != context).any():
            raise ValueError("only steps of decoding rows with equal contexts are measured")
        blocks = -(-context // self.shape.block_tokens)
        table = torch.from_numpy(step.block_table[step.table_rows, :blocks]).long()
        return GatherPlan(torch.from_numpy(step.write_slots), table, context)

    def write_kv(self, planned: GatherPlan, layer: int, k: torch.Tensor, v: torch.Tensor) -> Event:
        """Scatters one token a row."""
        blocks, offsets = planned.slots // self.shape.block_tokens, planned.slots % self.shape.block_tokens
        self.pool[blocks, layer, 0, offsets] = k.to(self.shape.dtype)
        self.pool[blocks, layer, 1, offsets] = v.to(self.shape.dtype)
        return Done()

    def attend(self, planned: GatherPlan, layer: int, q: torch.Tensor, out: torch.Tensor) -> Event:
        """`[rows, heads, 1, size]` against `[rows, kv_heads, context, size]`."""
        rows = len(planned.blocks)
        both = self.pool[planned.blocks, layer]  # [rows, blocks, 2, block_tokens, kv_heads, size]
        both = both.permute(2, 0, 4, 1, 3, 5).reshape(2, rows, self.shape.kv_heads, -1, self.shape.head_size)
        k, v = both[:, :, :, : planned.context_tokens].float()
        attended = torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)
        out.copy_(attended.squeeze(2))
        return Done()
