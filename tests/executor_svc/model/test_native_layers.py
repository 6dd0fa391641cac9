"""All layers in one call give the bits of the loop over native parts, whatever the instruction set, and the same KV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from executor_svc.attention import KVShape
from executor_svc.backends import select_backend
from executor_svc.kernels.elementwise import TorchElementwise, select_elementwise
from executor_svc.kernels.library import load
from executor_svc.model.linear import Arithmetic, Packer
from executor_svc.model.llama import Llama
from executor_svc.model.loader import load_weights
from executor_svc.model.weights import Weights
from tests.support.step_plans import Chunk, Sequences
from tests.support.tiny_llama import make_tiny_llama

LIBRARY = load()
ISAS = LIBRARY.isas if LIBRARY is not None else ()
TOKENS = 400
STEPS = (
    [Chunk(0, range(1, 131), sample=False), Chunk(1, range(7, 12))],
    [Chunk(0, range(131, 400), 130), Chunk(1, [5], 5, sample=False), Chunk(2, range(3, 40))],
    [Chunk(2, [9], 37), Chunk(0, [8], 399, write=False), Chunk(1, [8], 6)],
    [Chunk(1, [17, 18], 7, sample=False)],
)
"""Prefills, chunks and decodes; not all of them sample, in one step nobody does."""


def weights_of(folder: Path, hidden: int, heads: int, rich: bool) -> Weights:
    """A tiny model; rich: with biases, and norms of queries and keys."""
    weights = load_weights(make_tiny_llama(folder, hidden=hidden, heads=heads, kv_heads=heads // 3, layers=3))
    if not rich:
        return weights
    tensors, random = dict(weights.tensors), torch.Generator().manual_seed(1)
    for name, tensor in weights.tensors.items():
        if name.endswith("proj.weight"):
            tensors[name.removesuffix("weight") + "bias"] = torch.randn(tensor.shape[0], generator=random)
    for layer in range(3):
        for part in ("q_norm", "k_norm"):
            size = weights.config.head_size
            tensors[f"model.layers.{layer}.self_attn.{part}.weight"] = torch.rand(size, generator=random) + 0.5
    return replace(weights, tensors=tensors, config=replace(weights.config, architecture="qwen3"))


def network(weights: Weights, arithmetic: Arithmetic, isa: str, sequences: Sequences) -> Llama:
    config = weights.config
    shape = KVShape(sequences.blocks, config.layers, 16, config.kv_heads, config.head_size, torch.float16)
    backend = select_backend(shape, f"native-{isa}")
    return Llama(weights, Packer(arithmetic, isa=isa), backend, select_elementwise(isa=isa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("arithmetic", ["fp16", "int16", "int8"])
@pytest.mark.parametrize(
    ("hidden", "heads", "rich"), [(96, 6, False), (72, 9, True)], ids=["plain", "rich, no whole panels"]
)
def test_one_call_gives_the_bits_of_the_loop(
    tmp_path: Path, arithmetic: Arithmetic, isa: str, hidden: int, heads: int, rich: bool
) -> None:
    sequences = Sequences(3, TOKENS)
    weights = weights_of(tmp_path, hidden, heads, rich)
    whole, loop = (network(weights, arithmetic, isa, sequences) for _ in range(2))
    assert whole.native is not None
    loop.native = None
    for chunks in STEPS:
        plan = sequences.plan(chunks)
        one, many = whole.forward(plan), loop.forward(plan)
        assert (one is None) == (many is None) == (len(plan.sample_rows) == 0)
        if one is not None and many is not None:
            assert torch.isfinite(one).all() and torch.equal(one, many)
    assert torch.equal(whole.backend.pool.view(torch.int16), loop.backend.pool.view(torch.int16))


@pytest.mark.skipif(not ISAS, reason="no native kernels")
def test_threads_change_no_bit_and_foreign_parts_bring_the_loop_back(tmp_path: Path) -> None:
    sequences = Sequences(3, TOKENS)
    llama = network(weights_of(tmp_path, 96, 6, False), "fp16", ISAS[0], sequences)
    plan = sequences.plan([Chunk(0, range(1, 301))])
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(llama.forward(plan))
    finally:
        torch.set_num_threads(before)
    assert found[0] is not None and all(other is not None and torch.equal(found[0], other) for other in found)
    assert llama.with_parts(llama.backend, TorchElementwise()).native is None
