"""Attention as one writes it first for a batch: gather the context of every row, then torch's own, layer by layer."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from executor_svc.attention import Event, Planned
from executor_svc.attention_torch import DONE, PlainAttention, TorchPlan
from executor_svc.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Blocks of every row `[rows, blocks of the context]`, one index for all layers."""

    inner: TorchPlan
    blocks: torch.Tensor


class GatherAttention(PlainAttention):
    """Decoding rows of equal, whole-block contexts in one call; what the paged kernels are measured against."""

    name = "gather-sdpa"
    tuned = False

    def tune(self) -> GatherAttention:
        """The same over the same pool with one copy in place of two: whole blocks of keys, and of values."""
        other = copy(self)
        other.tuned = True
        return other

    def plan(self, step: StepPlan) -> Planned:
        """See AttentionBackend. ValueError for a step of another kind."""
        context = int(step.context_tokens[0])
        if step.tokens != step.rows or (step.context_tokens != context).any() or context % self.shape.block_tokens:
            raise ValueError("only decoding rows with equal contexts of whole blocks are measured")
        inner = super().plan(step)
        if not isinstance(inner, TorchPlan):
            raise TypeError("a plan of another backend")
        return GatherPlan(inner, torch.stack([row.blocks for row in inner.rows]))

    def write_kv(self, planned: Planned, layer: int, k: torch.Tensor, v: torch.Tensor) -> Event:
        """See AttentionBackend."""
        return super().write_kv(_plan(planned).inner, layer, k, v)

    def attend(self, planned: Planned, layer: int, q: torch.Tensor, out: torch.Tensor) -> Event:
        """See AttentionBackend. `[rows, heads, 1, size]` against `[rows, kv_heads, context, size]`."""
        gather = self._gather_tuned if self.tuned else self._gather
        k, v = gather(_plan(planned).blocks, layer)
        out.copy_(scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2))
        return DONE

    def _gather(self, blocks: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each `[rows, kv_heads, context, size]`."""
        both = self.pool[blocks, layer].permute(2, 0, 4, 1, 3, 5).flatten(3, 4).float()
        return both[0], both[1]

    def _gather_tuned(self, blocks: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = self.pool.view(2 * self.shape.layers * self.shape.blocks, -1)
        index = ((blocks * self.shape.layers + layer) * 2).flatten()
        shape = (len(blocks), -1, self.shape.kv_heads, self.shape.head_size)
        keys, values = (pieces.index_select(0, index + which).view(shape) for which in (0, 1))
        return keys.transpose(1, 2).float(), values.transpose(1, 2).float()


def _plan(planned: Planned) -> GatherPlan:
    if not isinstance(planned, GatherPlan):
        raise TypeError("the step was planned by another backend")
    return planned
