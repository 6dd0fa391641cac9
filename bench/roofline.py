"""What this machine allows: how fast it reads memory and multiplies, and the shortest step that follows from it.

Both are measured, on torch's number of threads, with code that is not ours: a dot product of arrays far larger than any
cache, and a large fp32 matrix product. The best of several, since what disturbs can only make slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from executor_svc.model.config import LlamaConfig

READ_FLOATS = 64 << 20
PRODUCT_SIZE = 2048
TRIES = 8
FP16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured, with so many threads."""

    threads: int
    read_bytes_per_s: float
    flops: float

    def describe(self) -> str:
        """For the head of a table."""
        return (
            f"this machine reads {self.read_bytes_per_s / 1e9:.1f} GB/s and multiplies {self.flops / 1e9:.0f} GFLOP/s "
            f"in fp32, on {self.threads} threads"
        )

    def step_s(self, config: LlamaConfig, rows: int, context: int) -> float:
        """The floor of a step in which each of `rows` rows decodes one token: the weights are read once, in fp16, and
        each row's keys and values of `context` tokens, or the arithmetic is done, whichever takes longer."""
        read = weights(config) * FP16_BYTES + kv_values(config, rows, context) * FP16_BYTES
        return max(read / self.read_bytes_per_s, operations(config, rows, context) / self.flops)

    def attention_s(self, config: LlamaConfig, rows: int, context: int) -> float:
        """How long it takes to read the keys and values of such a step, if they are fp32."""
        return kv_values(config, rows, context) * FP32_BYTES / self.read_bytes_per_s


def measure_machine() -> Machine:
    """Takes about a second."""
    ones, more = torch.ones(READ_FLOATS), torch.ones(READ_FLOATS)
    read_s = _best_s(lambda: torch.dot(ones, more))
    square = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
    product = torch.empty_like(square)
    product_s = _best_s(lambda: torch.mm(square, square, out=product))
    return Machine(torch.get_num_threads(), 2 * ones.nbytes / read_s, 2 * PRODUCT_SIZE**3 / product_s)


def weights(config: LlamaConfig) -> int:
    """Of the matrices that every token is multiplied with; the head is one of them."""
    heads = config.heads * config.head_size
    layer = config.hidden * (2 * heads + 2 * config.kv_heads * config.head_size + 3 * config.ffn)
    return config.layers * layer + config.hidden * config.vocabulary


def kv_values(config: LlamaConfig, rows: int, context: int) -> int:
    """Keys and values that a step reads."""
    return rows * context * config.layers * 2 * config.kv_heads * config.head_size


def operations(config: LlamaConfig, rows: int, context: int) -> int:
    """Multiplications and additions of a step, one token a row."""
    attention = 4 * config.layers * config.heads * config.head_size * context
    return rows * (2 * weights(config) + attention)


def _best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIES):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return min(times)
