"""Which shapes the kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor_svc.attention import KVShape

BLOCK_TOKENS = 16
GROUP_MAX = 8
"""Query heads a KV head that one tensor-core tile holds: every group from 1 up to it is supported."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled set of kernels."""

    head_size: int
    dtype: torch.dtype

    @property
    def defines(self) -> tuple[str, ...]:
        """What the compiler is told."""
        return f"-DHEAD_SIZE={self.head_size}", f"-DELEMENT_{ELEMENTS[self.dtype].upper()}"

    def __str__(self) -> str:
        return f"head{self.head_size}-{ELEMENTS[self.dtype]}"


ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
VARIANTS = tuple(Variant(head_size, dtype) for head_size in (64, 128) for dtype in ELEMENTS)


def variant_for(shape: KVShape, query_heads: int) -> Variant | None:
    """The variant that serves a pool for that many query heads; None where there is none."""
    group, rest = divmod(query_heads, shape.kv_heads)
    wanted = Variant(shape.head_size, shape.dtype)
    fits = shape.block_tokens == BLOCK_TOKENS and not rest and 1 <= group <= GROUP_MAX
    return wanted if fits and wanted in VARIANTS else None


def why_not(shape: KVShape, query_heads: int) -> str:
    """One line on why no variant serves a pool."""
    return (
        f"the CUDA kernels compute head sizes 64 and 128 in bf16 and fp16, blocks of {BLOCK_TOKENS} tokens and 1 to "
        f"{GROUP_MAX} query heads a KV head, not head size {shape.head_size} in {shape.dtype}, blocks of "
        f"{shape.block_tokens} and {query_heads} heads over {shape.kv_heads}"
    )
