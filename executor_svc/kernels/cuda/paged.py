"""The CUDA kernels as functions over tensors of one pool. Nothing here waits, allocates or copies to the host.

Tensors lie on the launcher's device; `stream` is a cudaStream_t as an integer, 0 for the default one, and nothing on
the emulation. Callers check a step before (attention_pool.check_columns and check_table); shapes are checked here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from executor_svc.attention import KVShape
from executor_svc.kernels.cuda.launch import Launcher, kernel
from executor_svc.kernels.cuda.variants import BLOCK_TOKENS, variant_for, why_not

DECODE_WARPS, DECODE_THREADS, WRITE_THREADS, MOVE_THREADS = 4, 128, 128, 256
FIXED_CHUNK_BLOCKS = 32
"""Blocks of a split where results must be reproducible: 512 tokens."""
_MOST_SPLITS = 64
_RESIDENT = 3
"""Thread blocks of a decode that a processor holds at once, about."""
_TURNS_TO_BEGIN = 4
"""What a thread block's beginning and end cost, in turns of its warps."""
_MOVE_BYTES = 32 << 10
"""Of a block that one thread block moves, about."""


@dataclass(frozen=True, slots=True)
class Splits:
    """How a row's context is divided: `count` splits of `chunk_blocks` blocks, the last takes all that is left; with
    `chunk_blocks` 0 evenly."""

    count: int
    chunk_blocks: int = 0

    @classmethod
    def fixed(cls, max_context: int, chunk_blocks: int = FIXED_CHUNK_BLOCKS) -> Splits:
        """Splits of one size, enough for contexts up to `max_context`: a row's bits then depend on nothing but its own
        context and `chunk_blocks`, whatever `max_context` and the other rows."""
        blocks = -(-max_context // BLOCK_TOKENS)
        return cls(max(1, -(-blocks // chunk_blocks)), chunk_blocks)

    @classmethod
    def even(cls, rows: int, kv_heads: int, max_context: int, processors: int) -> Splits:
        """The number with which the device is done soonest if all contexts were `max_context` tokens long: thread
        blocks come in waves of as many as its `processors` hold at once. Bits depend on the batch's size."""
        return cls(_soonest(rows * kv_heads, max(1, -(-max_context // BLOCK_TOKENS)), processors))


@cache
def _soonest(thread_blocks: int, blocks: int, processors: int) -> int:
    """Splits, with so many thread blocks each, after which the least turns have passed."""

    def turns(splits: int) -> int:
        waves = -(-thread_blocks * splits // (processors * _RESIDENT))
        return waves * (-(-blocks // (splits * DECODE_WARPS)) + _TURNS_TO_BEGIN)

    return min(range(1, min(_MOST_SPLITS, -(-blocks // DECODE_WARPS)) + 1), key=turns)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One query a row. int32 tensors, contiguous; of the table, rows lie `table.stride(0)` entries apart.

    contexts: [rows] tokens that the query attends to, 0: the result is 0. table: [*, blocks] pool block ids; entries
    behind a context are not read. table_rows: [rows] which row of the table, None: the same one. tokens: [rows] which
    row of q and out, None: the same one.
    """

    contexts: torch.Tensor
    table: torch.Tensor
    table_rows: torch.Tensor | None = None
    tokens: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for one in (self.contexts, self.table_rows, self.tokens):
            if one is not None and (
                one.dtype != torch.int32 or one.shape != self.contexts.shape or not one.is_contiguous()
            ):
                raise ValueError(f"columns of rows must be contiguous int32 {list(self.contexts.shape)}")
        if self.table.dtype != torch.int32 or self.table.dim() != 2 or self.table.stride(1) != 1:
            raise ValueError("the block table must be int32 [rows, blocks] with adjacent entries")


class PagedKernels:
    """The kernels of one pool's shape for a model with `query_heads` heads. Compiles when made.

    `pool`: `[blocks, layers, 2, block_tokens, kv_heads, head_size]` of the shape's type, contiguous, on the launcher's
    device. ValueError: no variant for the shape.
    """

    def __init__(self, launcher: Launcher, shape: KVShape, query_heads: int) -> None:
        variant = variant_for(shape, query_heads)
        if variant is None:
            raise ValueError(why_not(shape, query_heads))
        self.shape, self.query_heads, self.launcher = shape, query_heads, launcher
        module = launcher.module(variant)
        self._decode = kernel(module, "paged_decode")
        self._merge = kernel(module, "merge_splits")
        self._write_kv = kernel(module, "write_kv")
        self._move_blocks = kernel(module, "move_blocks")
        self._token = shape.kv_heads * shape.head_size
        self._values = shape.block_tokens * self._token
        self._block = shape.layers * 2 * self._values

    def scratch_floats(self, rows: int, splits: int) -> int:
        """float32 elements of the scratch that a decode of so many rows and splits needs."""
        return rows * self.query_heads * splits * (self.shape.head_size + 2) if splits > 1 else 0

    def decode(
        self,
        pool: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        rows: DecodeRows,
        splits: Splits,
        scratch: torch.Tensor,
        stream: int = 0,
    ) -> None:
        """Attention of one query a row over its context in `layer`; scale 1/sqrt(head_size).

        q: `[tokens, heads, head_size]` of the pool's type, a token's elements adjacent and aligned to 16 bytes; out:
        the same shape, of the pool's type or float32; other rows are left alone. scratch: float32, see scratch_floats;
        it may be shared by launches that follow each other on one stream.
        """
        count, size, heads = len(rows.contexts), self.shape.head_size, self.query_heads
        for x, types in ((q, (self.shape.dtype,)), (out, (self.shape.dtype, torch.float32))):
            self._check_heads(x, heads, types)
        if scratch.dtype != torch.float32 or scratch.numel() < self.scratch_floats(count, splits.count):
            raise ValueError(f"scratch must be float32 of {self.scratch_floats(count, splits.count)} elements")
        parts = scratch.data_ptr()
        sums = parts + count * heads * splits.count * size * 4
        out_float, tokens = int(out.dtype == torch.float32), _address(rows.tokens)
        self._decode(
            (self.shape.kv_heads, count, splits.count),
            DECODE_THREADS,
            (
                *(out.data_ptr(), out.stride(0), out_float, parts, sums, q.data_ptr(), q.stride(0)),
                *(self._layer(pool, layer), self._block, self._values, self._token),
                *(rows.table.data_ptr(), rows.table.stride(0), _address(rows.table_rows), tokens),
                *(rows.contexts.data_ptr(), heads // self.shape.kv_heads, splits.chunk_blocks),
                math.log2(math.e) / math.sqrt(size),
            ),
            stream,
        )
        if splits.count > 1:
            self._merge(
                (heads, count, 1),
                size,
                (
                    *(out.data_ptr(), out.stride(0), out_float, parts, sums, tokens),
                    *(rows.contexts.data_ptr(), splits.count, splits.chunk_blocks),
                ),
                stream,
            )

    def write_kv(
        self, pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, stream: int = 0
    ) -> None:
        """Stores k and v `[>= n, kv_heads, head_size]` of the pool's type at slots int64 `[n]` (block id * 16 + place;
        -1 is skipped); a token's elements adjacent and aligned to 16 bytes."""
        for x in (k, v):
            self._check_heads(x, self.shape.kv_heads, (self.shape.dtype,))
        if slots.dtype != torch.int64 or slots.dim() != 1 or min(len(k), len(v)) < len(slots):
            raise ValueError(f"{len(slots)} slots of {slots.dtype} for {len(k)} keys and {len(v)} values")
        self._write_kv(
            (len(slots), 1, 1),
            WRITE_THREADS,
            (
                *(self._layer(pool, layer), self._block, self._values, self._token, k.data_ptr(), k.stride(0)),
                *(v.data_ptr(), v.stride(0), slots.data_ptr(), self._token),
            ),
            stream,
        )

    def copy_blocks(self, pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, stream: int = 0) -> None:
        """Copies whole blocks inside the pool; both int64 `[n]`, no target is a source."""
        size, base = self.shape.block_bytes, pool.data_ptr()
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources for {len(targets)} targets")
        self._move((base, size, targets), (base, size, sources), len(sources), size, stream)

    def read_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, into: torch.Tensor, stream: int = 0) -> None:
        """Gathers blocks int64 `[n]` into uint8 `[n, >= block_bytes]`, rows a multiple of 16 bytes apart."""
        size = self._check_bytes(into, len(blocks))
        self._move((into.data_ptr(), into.stride(0), None), (pool.data_ptr(), size, blocks), len(blocks), size, stream)

    def write_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, source: torch.Tensor, stream: int = 0) -> None:
        """Scatters uint8 `[n, >= block_bytes]`, rows a multiple of 16 bytes apart, to blocks int64 `[n]`."""
        size = self._check_bytes(source, len(blocks))
        places = (pool.data_ptr(), size, blocks)
        self._move(places, (source.data_ptr(), source.stride(0), None), len(blocks), size, stream)

    def gather_layer(
        self, pool: torch.Tensor, layer: int, blocks: torch.Tensor, into: torch.Tensor, stream: int = 0
    ) -> None:
        """Gathers one layer's keys and values of blocks int64 `[n]` into contiguous
        `[n, 2, block_tokens, kv_heads, head_size]` of the pool's type: a prefix, for a fused prefill."""
        wanted = (len(blocks), 2, self.shape.block_tokens, self.shape.kv_heads, self.shape.head_size)
        if into.dtype != self.shape.dtype or into.shape != wanted or not into.is_contiguous():
            raise ValueError(f"expected contiguous {self.shape.dtype} {list(wanted)}")
        size = 2 * self._values * self.shape.dtype.itemsize
        source = (self._layer(pool, layer), self.shape.block_bytes, blocks)
        self._move((into.data_ptr(), size, None), source, len(blocks), size, stream)

    def _move(
        self,
        target: tuple[int, int, torch.Tensor | None],
        source: tuple[int, int, torch.Tensor | None],
        count: int,
        size: int,
        stream: int,
    ) -> None:
        """`size` bytes each; a place is its address, the bytes between blocks, and which blocks."""
        for _, _, index in (target, source):
            if index is not None and (index.dtype != torch.int64 or index.dim() != 1):
                raise ValueError("block ids must be int64 [n]")
        arguments = (*target[:2], _address(target[2]), *source[:2], _address(source[2]), size)
        self._move_blocks((count, -(-size // _MOVE_BYTES), 1), MOVE_THREADS, arguments, stream)

    def _layer(self, pool: torch.Tensor, layer: int) -> int:
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer {layer} is outside of 0 to {self.shape.layers - 1}")
        return pool.data_ptr() + layer * 2 * self._values * self.shape.dtype.itemsize

    def _check_heads(self, x: torch.Tensor, heads: int, types: tuple[torch.dtype, ...]) -> None:
        wanted = (heads, self.shape.head_size)
        if x.dtype not in types or x.dim() != 3 or x.shape[1:] != wanted or x.stride()[1:] != (wanted[1], 1):
            raise ValueError(f"expected {types[0]} [n, {heads}, {wanted[1]}], a token's elements adjacent")
        if x.data_ptr() % 16 or x.stride(0) * x.dtype.itemsize % 16:
            raise ValueError("a token's elements must be aligned to 16 bytes")

    def _check_bytes(self, x: torch.Tensor, blocks: int) -> int:
        size = self.shape.block_bytes
        if x.dtype != torch.uint8 or x.dim() != 2 or len(x) != blocks or x.shape[1] < size or x.stride(1) != 1:
            raise ValueError(f"expected uint8 [{blocks}, {size}], not {x.dtype} {list(x.shape)}")
        if x.data_ptr() % 16 or x.stride(0) % 16:
            raise ValueError("blocks must be aligned to 16 bytes")
        return size


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
