"""What is told of a loaded model, and the fingerprint of its bits: equal ones share their blocks of KV."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from executor_svc.attention import AttentionBackend
from executor_svc.model.weights import Weights
from executor_svc.model_info import ModelInfo

LAYOUT = "block-major-1"


def info_of(
    weights: Weights, backend: AttentionBackend, arithmetic: str, computes: Sequence[str], *, row_multiple: int = 1
) -> ModelInfo:
    """`computes`: all that decides the bits of results beside the weights and the layout of the pool."""
    config, shape = weights.config, backend.shape
    kv = str(shape.dtype).removeprefix("torch.")
    pool = f"kv={kv} block={shape.block_tokens} layers={shape.layers} heads={shape.kv_heads}x{shape.head_size}"
    text = "; ".join((f"layout={LAYOUT}", pool, *computes, "tp=1"))
    return ModelInfo(
        name=weights.name,
        version=weights.version,
        fingerprint=hashlib.sha256(text.encode()).digest(),
        fingerprint_text=text,
        context_tokens=config.context_tokens,
        vocabulary=config.vocabulary,
        block_tokens=shape.block_tokens,
        pool_blocks=shape.blocks,
        block_bytes=shape.block_bytes,
        backend=backend.name,
        arithmetic=arithmetic,
        bit_invariant=False,
        row_multiple=row_multiple,
    )
