"""What the stages of gpu_check share: the device, the sizes, clocks and deadlines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import torch

from executor_svc.attention import KVShape
from executor_svc.attention_choice import Device, find_device
from executor_svc.attention_cupy_cuda import CupyCudaAttention
from executor_svc.attention_device import DeviceAttention
from executor_svc.attention_torch_cuda import TorchCudaAttention
from executor_svc.copies_guard import InUse
from executor_svc.model.config import LlamaConfig

Figures = dict[str, Any]
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. On a GPU it must not fit into its caches."""

    ceiling_bytes: int
    pinned_bytes: int
    gemm: int
    check_lengths: tuple[int, ...]
    attention_rows: int
    attention_context: int
    attention_layers: int
    model: LlamaConfig
    batches: tuple[int, ...]
    context: int
    steps: int
    swap_bytes: int


def llama_config(
    layers: int, hidden: int, heads: int, kv_heads: int, head_size: int, ffn: int, vocab: int
) -> LlamaConfig:
    """A Llama of these sizes."""
    return LlamaConfig(
        architecture="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=ffn,
        vocabulary=vocab,
        context_tokens=8192,
        norm_epsilon=1e-5,
        rope_base=500000.0,
        rope_divisors=(1.0,) * (head_size // 2),
        tied=False,
        bos_id=None,
        eos_ids=(),
    )


LARGE = Sizes(
    ceiling_bytes=4 << 30,
    pinned_bytes=1 << 30,
    gemm=8192,
    check_lengths=(1, 15, 16, 17, 333, 2049),
    attention_rows=32,
    attention_context=8192,
    attention_layers=2,
    model=llama_config(32, 4096, 32, 8, 128, 14336, 128256),
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    context=1024,
    steps=40,
    swap_bytes=4 << 30,
)
TINY = Sizes(
    ceiling_bytes=1 << 20,
    pinned_bytes=1 << 20,
    gemm=64,
    check_lengths=(1, 16, 40),
    attention_rows=2,
    attention_context=64,
    attention_layers=2,
    model=llama_config(2, 256, 4, 2, 64, 256, 512),
    batches=(1, 3),
    context=32,
    steps=2,
    swap_bytes=1 << 20,
)


class OutOfTime(Exception):
    """A stage has used up its time; what it has measured so far counts."""


@dataclass(slots=True)
class Stage:
    """One stage under way: its deadline, and its figures so far."""

    deadline: float
    figures: Figures = field(default_factory=dict)

    def check(self, needs_s: float = 0.0) -> None:
        """Raises OutOfTime if so many seconds are not left."""
        if monotonic() + needs_s > self.deadline:
            raise OutOfTime


class Bench:
    """The device, and how time is taken on it."""

    def __init__(self, *, tiny: bool) -> None:
        self.said: list[str] = []
        device = None if tiny else find_device("auto", False, self.said.append)
        self.real = device is not None
        if device is None:
            device = find_device("cupy_cuda", True, self.said.append)
            assert device is not None
        self.device: Device = device
        self.torch_device = device.device
        self.sizes = LARGE if self.real else TINY
        self.dtype = torch.bfloat16

    @property
    def names(self) -> list[str]:
        """Of the backends that run here, the best one first."""
        return ["cupy_cuda", "torch_cuda"] if self.device.launcher is not None else ["torch_cuda"]

    def backend(self, name: str, shape: KVShape, query_heads: int) -> DeviceAttention:
        """One of `names`, over a pool of its own."""
        found: DeviceAttention
        if name == "cupy_cuda" and self.device.launcher is not None:
            found = CupyCudaAttention(shape, query_heads, self.device.launcher)
        else:
            found = TorchCudaAttention(shape, self.torch_device)
        found.in_use = None if self.real else InUse()
        return found

    def sync(self) -> None:
        """Waits for the device."""
        if self.real:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 10, inner: int = 3) -> float:
        """Of one `work`: the median of `repeats` times, of `inner` in a row each, on the device's clock."""
        work()
        self.sync()
        times = []
        for _ in range(repeats):
            if self.real:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(inner):
                    work()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3 / inner)
            else:
                started = perf_counter()
                for _ in range(inner):
                    work()
                times.append((perf_counter() - started) / inner)
        return max(float(median(times)), 1e-9)


def ratio(value: float, of: float) -> float:
    """Rounded to three digits behind the point; 0 of nothing."""
    return round(value / of, 3) if of else 0.0
