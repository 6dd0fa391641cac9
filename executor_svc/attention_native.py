"""Paged attention by the native kernels. The same bits whatever the chunk, the batch and the number of threads.

In its pool keys are `[kv_heads, head_size, block_tokens]` inside of a block's layer, values `[kv_heads, block_tokens,
head_size]`: what a vector of scores, or of weighted values, adds up lies side by side, and a head in one piece.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.attention import Done, Event, KVShape, Planned
from executor_svc.attention_items import Cutter, Items
from executor_svc.attention_pool import allocate, check_blocks, check_bytes, check_columns, check_heads
from executor_svc.kernels.library import Library, threads_for
from executor_svc.step_plan import StepPlan

DONE = Done()
LAYOUT = "keys=heads-by-size-by-tokens values=heads-by-tokens-by-size"
CACHE_LINE_FLOATS = 16
WORTH_THREADS_PAIRS = 512
"""Pairs of query and position, all heads together, that are worth waking threads."""

_pointer, _i64 = ctypes.c_void_p, ctypes.c_int64


class Job(ctypes.Structure):
    """`Job` of kernels/attention.h, field by field."""

    _fields_ = (
        *(("pool", _pointer), ("q", _pointer), ("out", _pointer), ("q_stride", _i64), ("out_stride", _i64)),
        *(("block_stride", _i64), ("block_tokens", _i64), ("kv_heads", _i64), ("group", _i64), ("head_size", _i64)),
        *(("half", _i64), ("table", _pointer), ("table_stride", _i64), ("table_rows", _pointer)),
        *(("query_start", _pointer), ("context_tokens", _pointer), ("items", _pointer), ("item_count", _i64)),
        *(("merges", _pointer), ("merge_count", _i64), ("scratch", _pointer), ("scratch_floats", _i64)),
        *(("parts", _pointer), ("threads", _i64)),
    )


@dataclass(slots=True)
class NativePlan:
    """A checked step; its job is made at the first layer, when the number of query heads is known."""

    step: StepPlan
    threads: int
    job: Job | None = None
    items: Items | None = None  # keeps alive what the job points to
    group: int = 0


class NativeAttention:
    """The backend over one pool. One thread at a time; the work is spread over torch's number of threads."""

    bit_invariant = True

    def __init__(self, shape: KVShape, library: Library, isa: str | None = None) -> None:
        self.shape = shape
        self.isa = library.pick(isa)
        self.name = f"native-{self.isa}"
        self.pool = allocate(shape).flatten(3)
        self.library = library
        self._attend = library.kernel("attend", self.isa)
        self._scratch_size = library.kernel("attend_scratch", self.isa)
        self._part_size = library.kernel("attend_part", self.isa)
        self._write_kv = library.kernel("write_kv", self.isa)
        self._move_rows = library.kernel("move_rows", self.isa)
        self._check_table = library.kernel("check_table", self.isa)
        self._half = int(shape.dtype == torch.float16)
        self._width = shape.kv_heads * shape.head_size
        self._block_stride = shape.block_bytes // shape.dtype.itemsize
        self.layer_bytes = 2 * shape.block_tokens * self._width * shape.dtype.itemsize
        self._scratch = torch.zeros(0)
        self._parts = torch.zeros(0)
        self._cutter = Cutter()

    def describe(self) -> str:
        """See AttentionBackend."""
        return f"attention={self.library.describe(self.isa)} {LAYOUT}"

    def plan(self, step: StepPlan) -> Planned:
        """See AttentionBackend. ValueError: the step reaches outside of the pool or the table."""
        check_columns(step, self.shape)
        for array in (step.table_rows, step.query_start, step.context_tokens, step.positions):
            if array.dtype != np.int32 or not array.flags.c_contiguous:
                raise ValueError("columns of the step must be contiguous int32")
        if step.write_slots.dtype != np.int64 or not step.write_slots.flags.c_contiguous:
            raise ValueError("write slots must be contiguous int64")
        if step.block_table.dtype != np.int32 or step.block_table.strides[1] != 4:
            raise ValueError("the block table must be int32 with adjacent entries")
        bad = self._check_table(
            *(step.block_table.ctypes.data, step.block_table.strides[0] // 4, step.table_rows.ctypes.data),
            *(step.context_tokens.ctypes.data, step.rows, self.shape.block_tokens, self.shape.blocks),
        )
        if bad >= 0:
            raise ValueError(f"row {bad} names a block outside of 0 to {self.shape.blocks - 1}")
        return NativePlan(step, torch.get_num_threads())

    def write_kv(self, planned: Planned, layer: int, k: torch.Tensor, v: torch.Tensor) -> Event:
        """See AttentionBackend. Rows of k and v may lie in wider ones."""
        step = _plan(planned).step
        check_heads(k, step.tokens, self.shape.kv_heads, self.shape.head_size)
        check_heads(v, step.tokens, self.shape.kv_heads, self.shape.head_size)
        self._write_kv(
            *(self._layer(layer), self._half, self._block_stride, self.shape.block_tokens),
            *(self.shape.kv_heads, self.shape.head_size),
            *(step.write_slots.ctypes.data, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(step.tokens, threads_for(2 * step.tokens * self._width)),
        )
        return DONE

    def attend(self, planned: Planned, layer: int, q: torch.Tensor, out: torch.Tensor) -> Event:
        """See AttentionBackend. Rows of q and out may lie in wider ones; rows behind the plan's tokens are left."""
        plan = _plan(planned)
        tokens, heads = plan.step.tokens, q.shape[1]
        if tokens == 0:
            return DONE
        check_heads(q, tokens, heads, self.shape.head_size)
        check_heads(out, tokens, heads, self.shape.head_size)
        job = self.job(plan, heads)
        job.pool = self._layer(layer)
        job.q, job.q_stride = q.data_ptr(), q.stride(0)
        job.out, job.out_stride = out.data_ptr(), out.stride(0)
        self._attend(ctypes.byref(job))
        return DONE

    def job(self, planned: Planned, heads: int) -> Job:
        """What the kernel reads for a step of so many query heads, at the keys of the first layer; without q and out.
        It lives as long as the plan, and has room for torch's number of threads at the time of the plan."""
        plan = _plan(planned)
        if plan.job is None or plan.group * self.shape.kv_heads != heads:
            plan.job = self._make_job(plan, heads)
        return plan.job

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> Event:
        """See AttentionBackend."""
        check_blocks(sources, self.shape)
        check_blocks(targets, self.shape)
        self._move(self.pool, sources, self.pool, targets)
        return DONE

    def read_blocks(self, blocks: torch.Tensor, into: torch.Tensor) -> Event:
        """See AttentionBackend."""
        check_blocks(blocks, self.shape)
        check_bytes(into, len(blocks), self.shape)
        self._move(self.pool, blocks, into, None)
        return DONE

    def write_blocks(self, blocks: torch.Tensor, source: torch.Tensor) -> Event:
        """See AttentionBackend."""
        check_blocks(blocks, self.shape)
        check_bytes(source, len(blocks), self.shape)
        self._move(source, None, self.pool, blocks)
        return DONE

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer {layer} is outside of 0 to {self.shape.layers - 1}")
        return self.pool.data_ptr() + layer * self.layer_bytes

    def _make_job(self, plan: NativePlan, heads: int) -> Job:
        """Cuts the step's work and makes room for it."""
        shape, step = self.shape, plan.step
        group, rest = divmod(heads, shape.kv_heads)
        if rest or not group:
            raise ValueError(f"{heads} query heads do not divide over {shape.kv_heads} KV heads")
        items = self._cutter.cut(step, group, shape.kv_heads, plan.threads)
        threads = plan.threads if items.pairs * shape.kv_heads >= WORTH_THREADS_PAIRS else 1
        scratch_floats = self._scratch_size(shape.head_size, items.max_rows, items.max_total)
        scratch_floats += -scratch_floats % CACHE_LINE_FLOATS
        part_floats = self._part_size(shape.head_size, group) * shape.kv_heads
        self._scratch = _room(self._scratch, plan.threads * scratch_floats)
        self._parts = _room(self._parts, items.slots * part_floats)
        plan.group, plan.items = group, items
        return Job(
            pool=self._layer(0),
            block_stride=self._block_stride,
            block_tokens=shape.block_tokens,
            kv_heads=shape.kv_heads,
            group=group,
            head_size=shape.head_size,
            half=self._half,
            table=step.block_table.ctypes.data,
            table_stride=step.block_table.strides[0] // 4,
            table_rows=step.table_rows.ctypes.data,
            query_start=step.query_start.ctypes.data,
            context_tokens=step.context_tokens.ctypes.data,
            items=items.items.ctypes.data,
            item_count=len(items.items),
            merges=items.merges.ctypes.data,
            merge_count=len(items.merges),
            scratch=self._scratch.data_ptr(),
            scratch_floats=scratch_floats,
            parts=self._parts.data_ptr(),
            threads=threads,
        )

    def _move(
        self, source: torch.Tensor, sources: torch.Tensor | None, target: torch.Tensor, targets: torch.Tensor | None
    ) -> None:
        index = sources if sources is not None else targets
        count = 0 if index is None else len(index)
        self._move_rows(
            *(source.data_ptr(), None if sources is None else sources.contiguous().data_ptr()),
            *(target.data_ptr(), None if targets is None else targets.contiguous().data_ptr()),
            *(count, self.shape.block_bytes, threads_for(count * self.shape.block_bytes)),
        )


def _plan(planned: Planned) -> NativePlan:
    if not isinstance(planned, NativePlan):
        raise TypeError("the step was planned by another backend")
    return planned


def _room(have: torch.Tensor, floats: int) -> torch.Tensor:
    """`have` if it is large enough, or new room."""
    return have if have.numel() >= floats else torch.zeros(floats)
