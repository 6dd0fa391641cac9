"""Cases for attention backends: rows over shuffled blocks of a poisoned pool, and what they must give, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.attention import AttentionBackend, KVShape
from executor_svc.attention_native import NativeAttention
from executor_svc.step_plan import StepPlan
from tests.support.step_plans import sampling_rows

LAYERS = 2


def stored(backend: AttentionBackend, block: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a block in the pool, whatever its layout: `[block_tokens, kv_heads, head_size]` each."""
    shape = backend.shape
    keys, values = backend.pool[block, layer].flatten(1)
    if not isinstance(backend, NativeAttention):
        size = (shape.block_tokens, shape.kv_heads, shape.head_size)
        return keys.view(size), values.view(size)
    by_size = keys.view(shape.kv_heads, shape.head_size, shape.block_tokens)
    by_tokens = values.view(shape.kv_heads, shape.block_tokens, shape.head_size)
    return by_size.permute(2, 0, 1), by_tokens.permute(1, 0, 2)


@dataclass(frozen=True, slots=True)
class Span:
    """`queries` tokens of a sequence, up to a context of `end` tokens. `write` false: their KV is in the pool."""

    sequence: int
    end: int
    queries: int = 1
    write: bool = True


class Content:
    """Random queries, keys and values of some sequences, all layers, and where their blocks are.

    Sequences may share the blocks of a common prefix. Arrays are `[layers, sequences, tokens, heads, head_size]`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        kv_heads: int = 2,
        group: int = 1,
        head_size: int = 64,
        block_tokens: int = 16,
        dtype: torch.dtype = torch.float16,
        shared_tokens: int = 0,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        longest = max(lengths)
        size = (LAYERS, len(lengths), longest)
        self.q = random.standard_normal((*size, kv_heads * group, head_size), dtype=np.float32) * 2
        self.k = random.standard_normal((*size, kv_heads, head_size), dtype=np.float32)
        self.v = random.standard_normal((*size, kv_heads, head_size), dtype=np.float32)
        self.k[:, 1:, :shared_tokens] = self.k[:, :1, :shared_tokens]
        self.v[:, 1:, :shared_tokens] = self.v[:, :1, :shared_tokens]
        width = -(-longest // block_tokens)
        blocks = len(lengths) * width + 3
        self.table = random.permutation(blocks)[: len(lengths) * width].astype(np.int32).reshape(len(lengths), width)
        self.table[1:, : shared_tokens // block_tokens] = self.table[:1, : shared_tokens // block_tokens]
        self.shape = KVShape(blocks, LAYERS, block_tokens, kv_heads, head_size, dtype)
        self.lengths = lengths

    def plan(self, spans: Sequence[Span]) -> StepPlan:
        """A step of these spans. Table entries behind each sequence's length are poison."""
        size = self.shape.block_tokens
        table = self.table.copy()
        for row, length in enumerate(self.lengths):
            table[row, -(-length // size) :] = -(2**31)
        positions = [np.arange(span.end - span.queries, span.end) for span in spans]
        slots = [
            self.table[span.sequence, where // size].astype(np.int64) * size + where % size
            if span.write
            else np.full(len(where), -1, np.int64)
            for span, where in zip(spans, positions, strict=True)
        ]
        return StepPlan(
            step=0,
            token_ids=np.zeros(sum(span.queries for span in spans), np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            write_slots=np.concatenate(slots),
            query_start=np.cumsum([0, *(span.queries for span in spans)], dtype=np.int32),
            context_tokens=np.array([span.end for span in spans], np.int32),
            block_table=table,
            table_rows=np.array([span.sequence for span in spans], np.int32),
            sample_rows=np.empty(0, np.int32),
            sampling=sampling_rows(0),
        )

    def run(self, backend: AttentionBackend, spans: Sequence[Span], layer: int = 0) -> torch.Tensor:
        """Writes and attends one step; output rows follow the spans, `[tokens, heads, head_size]`."""
        planned = backend.plan(self.plan(spans))
        q, k, v = (self.rows(array[layer], spans) for array in (self.q, self.k, self.v))
        out = torch.full_like(q, float("nan"))
        backend.write_kv(planned, layer, k, v).wait()
        backend.attend(planned, layer, q, out).wait()
        return out

    def rows(self, array: NDArray[np.float32], spans: Sequence[Span]) -> torch.Tensor:
        """The spans' tokens of one layer's array, one after another."""
        return torch.from_numpy(
            np.concatenate([array[span.sequence, span.end - span.queries : span.end] for span in spans])
        )

    def expected(self, spans: Sequence[Span], layer: int = 0) -> NDArray[np.float64]:
        """The spans' output in float64, from keys and values rounded to the pool's type."""
        return np.concatenate([self._expected(span, layer) for span in spans])

    def _expected(self, span: Span, layer: int) -> NDArray[np.float64]:
        q = self.q[layer, span.sequence, span.end - span.queries : span.end].astype(np.float64)
        k, v = (
            torch.from_numpy(array[layer, span.sequence, : span.end]).to(self.shape.dtype).double().numpy()
            for array in (self.k, self.v)
        )
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2])
        future = np.arange(span.end) > np.arange(span.end - span.queries, span.end)[:, None]
        scores[:, future] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        result: NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), v)
        return result
