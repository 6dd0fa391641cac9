"""What this machine can do at most, and what a step of the model asks of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from bench.peers.figures import Machine, Sizes
from executor_svc.model.loader import load_weights
from executor_svc.model.weights import EMBEDDING
from jitney.serving import config

READ_FLOATS = 64 << 20  # 256 MiB: no cache holds it
PRODUCT = 1536
TRIES = 7
HALF_BYTES = 2


def machine(round_number: int) -> Machine:
    """The best of a few tries: reading memory by all cores, and fp32 products of large matrices."""
    numbers = torch.ones(READ_FLOATS)
    left, right = torch.ones(PRODUCT, PRODUCT), torch.ones(PRODUCT, PRODUCT)
    read_s = _best_s(numbers.sum)
    product_s = _best_s(lambda: left @ right)
    return Machine(
        round_number,
        gb_per_s=4 * READ_FLOATS / read_s / 1e9,
        gflop_per_s=2 * PRODUCT**3 / product_s / 1e9,
    )


def _best_s(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(TRIES):
        began = perf_counter()
        work()
        best = min(best, perf_counter() - began)
    return best


def sizes(model: Path) -> tuple[Sizes, int]:
    """Of the model, and its vocabulary."""
    weights = load_weights(model, config.cache_dir())
    shape = weights.config
    matrices = sum(
        tensor.numel() for name, tensor in weights.tensors.items() if tensor.dim() == 2 and name != EMBEDDING
    )
    if shape.tied:
        matrices += weights.head.numel()
    found = Sizes(
        weight_bytes=HALF_BYTES * matrices,
        kv_bytes=HALF_BYTES * 2 * shape.layers * shape.kv_heads * shape.head_size,
        parameters=matrices,
        attention_products=2 * shape.layers * shape.heads * shape.head_size,
    )
    return found, shape.vocabulary
