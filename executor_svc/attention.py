"""The seam between the model and whatever computes paged attention.

KV pool, block-major: `[blocks, layers, 2, ...]`, of the third axis K, then V. Inside of those a backend has the order
that suits it: to everybody else a block is bytes, which only the same backend can read (its `describe` tells). Every
launch returns an Event; on a CPU the work is done when the call returns. Each query row's own order of summation is
fixed: it never depends on other rows, on the chunk or on how the context was cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from executor_svc.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the pool. `dtype` is the pool's type, to which K and V are rounded before any row attends to them."""

    blocks: int
    layers: int
    block_tokens: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V."""
        per_token = self.layers * 2 * self.kv_heads * self.head_size * self.dtype.itemsize
        return self.block_tokens * per_token


class Event(Protocol):
    """The end of launched work."""

    def done(self) -> bool:
        """Whether the work has ended."""

    def wait(self) -> None:
        """Blocks until the work has ended."""


class Done:
    """The event of work that was finished when its launch returned."""

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class Planned(Protocol):
    """A step as a backend prepared it: opaque to the model."""


class AttentionBackend(Protocol):
    """Paged attention over one pool. Queries, keys and values are float32 `[T, heads, head_size]` on the CPU."""

    name: str
    pool: torch.Tensor
    shape: KVShape
    bit_invariant: bool

    def describe(self) -> str:
        """What decides the bits of the results beside the pool's type, and what the bytes of a block mean: for the
        fingerprint, which keeps blocks of other builds apart."""

    def plan(self, step: StepPlan) -> Planned:
        """Prepares a step once for all layers. Reads only table entries inside each row's planned context."""

    def write_kv(self, planned: Planned, layer: int, k: torch.Tensor, v: torch.Tensor) -> Event:
        """Rounds and stores k and v `[T, kv_heads, head_size]` at the plan's write slots; -1 is skipped."""

    def attend(self, planned: Planned, layer: int, q: torch.Tensor, out: torch.Tensor) -> Event:
        """Causal attention of q `[T, heads, head_size]` into out, same shape; scale 1/sqrt(head_size). The query at
        position p attends to positions 0 to p of its row."""

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> Event:
        """Copies whole blocks inside the pool; both int64 `[n]`, disjoint."""

    def read_blocks(self, blocks: torch.Tensor, into: torch.Tensor) -> Event:
        """Gathers blocks int64 `[n]` into uint8 `[n, block_bytes]`."""

    def write_blocks(self, blocks: torch.Tensor, source: torch.Tensor) -> Event:
        """Scatters uint8 `[n, block_bytes]` to blocks int64 `[n]`."""
