"""What there is to say about the model that is served."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """As `GetModelInfoResponse` (protos/jitney/executor/v1/executor.proto) explains it."""

    name: str
    version: str
    fingerprint: bytes
    fingerprint_text: str
    context_tokens: int
    vocabulary: int
    block_tokens: int
    pool_blocks: int
    block_bytes: int
    backend: str
    arithmetic: str
    bit_invariant: bool
    row_multiple: int
