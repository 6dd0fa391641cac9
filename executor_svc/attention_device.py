"""What the GPU backends of paged attention share: the pool on a device, a step's tables there, prefills, whole blocks.

A step has rows of one query (decodes), which each backend computes in its own way, and rows of several (prefills),
for which the context is gathered and torch's fused attention runs, its causal mask aligned bottom-right. Nothing here
waits for the device: sizes are known to the host, tokens that are not written go to a block of their own behind the
pool. All of it runs with a CPU as its device too, which is how it is tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from executor_svc.attention import Done, Event, KVShape, Planned
from executor_svc.attention_pool import check_blocks, check_bytes, check_columns, check_table
from executor_svc.copies_guard import InUse
from executor_svc.step_plan import StepPlan

DONE = Done()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class StreamEvent:
    """The end of all that was launched on a CUDA stream so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def done(self) -> bool:
        """See Event."""
        return bool(torch.cuda.current_stream(self._device).query())

    def wait(self) -> None:
        """See Event."""
        torch.cuda.current_stream(self._device).synchronize()


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one query, on the device. `tables` int32 [R, W] pool blocks, `contexts` int32 [R] tokens: 0 is a row of
    padding, whose output is zero. `queries` int64 [R]: their tokens; None: token i is row i."""

    tables: torch.Tensor
    contexts: torch.Tensor
    queries: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """One row of several queries, tokens first..last-1, over a context of `end` tokens in `blocks` (int64)."""

    first: int
    last: int
    end: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step on the device. `slots` int64 [>= tokens]: where each token's KV goes, -1 nowhere."""

    tokens: int
    slots: torch.Tensor
    decode: DecodeRows | None
    prefills: tuple[Prefill, ...] = ()


class DeviceAttention:
    """A backend over one pool on `device`. Work goes to the current stream, in order. One thread at a time.

    Queries, keys and values are of one float type, on the device. A subclass says how decode rows are computed.
    """

    name = "device"
    bit_invariant = False
    width_growth = 4
    """How much wider the next larger table is, where steps are made ready for several widths."""

    def __init__(self, shape: KVShape, device: torch.device) -> None:
        if shape.dtype not in DTYPES:
            raise ValueError(f"KV type {shape.dtype} is not one of {', '.join(map(str, DTYPES))}")
        self.shape = shape
        self.device = device
        self.in_use: InUse | None = None  # where the device is emulated: what finds blocks that are used in flight
        dimensions = (shape.layers, 2, shape.block_tokens, shape.kv_heads, shape.head_size)
        self._room = torch.zeros((shape.blocks + 1, *dimensions), dtype=shape.dtype, device=device)
        self.pool = self._room[: shape.blocks]
        self._bytes = self.pool.view(shape.blocks, -1).view(torch.uint8)
        self._nowhere = shape.blocks * shape.block_tokens  # the slot of tokens that are not written
        self._event: Event = StreamEvent(device) if device.type == "cuda" else DONE

    def describe(self) -> str:
        """See AttentionBackend."""
        return f"attention={self.name}-{torch.__version__}-{device_name(self.device)}"

    def plan(self, step: StepPlan) -> Planned:
        """See AttentionBackend. ValueError: the step reaches outside of the pool or the table."""
        check_columns(step, self.shape)
        check_table(step, self.shape)
        counts = np.diff(step.query_start)
        single = np.flatnonzero(counts == 1)
        prefills = []
        for row in np.flatnonzero(counts > 1).tolist():
            end = int(step.context_tokens[row])
            blocks = step.block_table[step.table_rows[row], : self.blocks_of(end)].astype(np.int64)
            first, last = int(step.query_start[row]), int(step.query_start[row + 1])
            prefills.append(Prefill(first, last, end, self.send(blocks)))
        decode = None
        if len(single):
            contexts = step.context_tokens[single]
            tables = tables_of(step, single, self.blocks_of(int(contexts.max())), self.shape.block_tokens)
            queries = None if len(single) == step.tokens else self.send(step.query_start[single].astype(np.int64))
            decode = DecodeRows(self.send(tables), self.send(contexts), queries)
        return DevicePlan(step.tokens, self.send(step.write_slots), decode, tuple(prefills))

    def write_kv(self, planned: Planned, layer: int, k: torch.Tensor, v: torch.Tensor) -> Event:
        """See AttentionBackend."""
        plan = device_plan(planned)
        self.check_heads(k, plan.tokens, self.shape.kv_heads)
        self.check_heads(v, plan.tokens, self.shape.kv_heads)
        self._write(plan, layer, k[: plan.tokens], v[: plan.tokens])
        return self._event

    def attend(self, planned: Planned, layer: int, q: torch.Tensor, out: torch.Tensor) -> Event:
        """See AttentionBackend."""
        plan = device_plan(planned)
        heads = q.shape[1]
        if heads % self.shape.kv_heads:
            raise ValueError(f"{heads} query heads do not divide over {self.shape.kv_heads} KV heads")
        self.check_heads(q, plan.tokens, heads)
        self.check_heads(out, plan.tokens, heads)
        rows = plan.decode
        if rows is not None and rows.queries is None:
            self._decode(rows, layer, q[: plan.tokens], out[: plan.tokens])
        elif rows is not None:
            some = torch.empty((len(rows.contexts), heads, self.shape.head_size), dtype=q.dtype, device=q.device)
            self._decode(rows, layer, q[rows.queries], some)
            out[rows.queries] = some
        for prefill in plan.prefills:
            self._prefill(prefill, layer, q[prefill.first : prefill.last], out[prefill.first : prefill.last])
        return self._event

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> Event:
        """See AttentionBackend. Ids are on the host."""
        check_blocks(sources, self.shape)
        check_blocks(targets, self.shape)
        self.copy_sent(self.send(sources.numpy()), self.send(targets.numpy()))
        return self._event

    def read_blocks(self, blocks: torch.Tensor, into: torch.Tensor) -> Event:
        """See AttentionBackend. Ids are on the host, `into` is on the device."""
        check_blocks(blocks, self.shape)
        check_bytes(into, len(blocks), self.shape)
        self._read(self.send(blocks.numpy()), into)
        return self._event

    def write_blocks(self, blocks: torch.Tensor, source: torch.Tensor) -> Event:
        """See AttentionBackend. Ids are on the host, `source` is on the device."""
        check_blocks(blocks, self.shape)
        check_bytes(source, len(blocks), self.shape)
        self._write_whole(self.send(blocks.numpy()), source)
        return self._event

    def blocks_of(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.shape.block_tokens)

    def check_heads(self, x: torch.Tensor, tokens: int, heads: int) -> None:
        """ValueError unless x is `[>= tokens, heads, head_size]`, of a float type, a token's elements adjacent."""
        size = self.shape.head_size
        if x.dim() != 3 or x.shape[0] < tokens or x.shape[1:] != (heads, size) or x.dtype not in DTYPES:
            raise ValueError(f"expected [{tokens}, {heads}, {size}] of a float type, not {x.dtype} {list(x.shape)}")
        if x.stride(2) != 1 or x.stride(1) != size:
            raise ValueError("the elements of a token's row must be adjacent")

    def _decode(self, rows: DecodeRows, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Decode rows: q and out `[R, heads, head_size]`."""
        raise TypeError(f"{self.name} computes no decode rows")

    def _write(self, plan: DevicePlan, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        slots = plan.slots[: plan.tokens]
        slots = torch.where(slots < 0, self._nowhere, slots)
        block, place = slots // self.shape.block_tokens, slots % self.shape.block_tokens
        for index, x in ((0, k), (1, v)):
            self._room[:, layer, index].index_put_((block, place), x.to(self.shape.dtype))

    def copy_sent(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies whole blocks; ids int64 `[n]` are on the device, so that it may be captured."""
        self._bytes[targets] = self._bytes[sources]

    def _read(self, blocks: torch.Tensor, into: torch.Tensor) -> None:
        torch.index_select(self._bytes, 0, blocks, out=into)

    def _write_whole(self, blocks: torch.Tensor, source: torch.Tensor) -> None:
        self._bytes[blocks] = source

    def _prefill(self, row: Prefill, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Gathers the context and attends to it, the last query seeing all of it."""
        k, v = (self.pool[row.blocks, layer, index].flatten(0, 1)[: row.end].to(q.dtype) for index in (0, 1))
        batch = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        heads = scaled_dot_product_attention(
            *(batch[0], batch[1], batch[2]),
            attn_mask=causal_lower_right(len(q), row.end),
            enable_gqa=q.shape[1] != self.shape.kv_heads,
        )
        out.copy_(heads[0].transpose(0, 1))

    def send(self, array: np.ndarray) -> torch.Tensor:
        """On the device, without waiting for what runs there."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor.clone()
        return tensor.pin_memory().to(self.device, non_blocking=True)


def tables_of(step: StepPlan, rows: np.ndarray, width: int, block_tokens: int) -> np.ndarray:
    """Block tables int32 `[len(rows), width]` of these rows; entries behind a row's context are 0."""
    tables = np.zeros((len(rows), width), np.int32)
    used = -(-step.context_tokens[rows] // block_tokens)
    most = int(used.max(initial=0))
    tables[:, :most] = step.block_table[step.table_rows[rows], :most]
    tables[np.arange(width) >= used[:, None]] = 0
    return tables


def device_plan(planned: Planned) -> DevicePlan:
    """TypeError if the plan is of another backend."""
    if not isinstance(planned, DevicePlan):
        raise TypeError("the step was planned by another backend")
    return planned


def device_name(device: torch.device) -> str:
    """For the fingerprint: what decides which of torch's kernels run."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} sm_{major}{minor}".replace(" ", "-")
    return torch.backends.cpu.get_cpu_capability()
