"""The forward pass against transformers, on random models of every kind that is built here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.model.linear import Arithmetic
from executor_svc.model.model import CpuModel
from tests.support.random_models import random_hf_model
from tests.support.step_plans import Chunk, Sequences, sampling_rows
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_llama import make_tiny_llama

LENGTHS = (1, 7, 16, 40, 100)
KINDS = ("Llama", "Llama-3", "Mistral", "Qwen2", "Qwen3")


def load(path: Path, arithmetic: Arithmetic = "fp32", **options: Any) -> tuple[CpuModel, Sequences]:
    """The model over a pool for as many sequences as LENGTHS."""
    sequences = Sequences(len(LENGTHS), 128)
    return CpuModel.load(path, arithmetic=arithmetic, kv="fp32", pool_blocks=sequences.blocks, **options), sequences


def prompts(vocabulary: int) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, vocabulary, length).tolist() for length in LENGTHS]


def oracle_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    """`[tokens, vocabulary]` by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def check_against_oracle(directory: Path, model: CpuModel, sequences: Sequences, tolerance: float) -> None:
    """Whole prompts in one batch, then two tokens of each decoded, against the oracle's logits of all tokens."""
    texts = prompts(model.config.vocabulary)
    logits = model.llama.forward(sequences.plan([Chunk(row, text) for row, text in enumerate(texts)]))
    assert logits is not None
    expected = [oracle_logits(directory, [*text, 5, 6]) for text in texts]
    for row, text in enumerate(texts):
        assert (logits[row] - expected[row][len(text) - 1]).abs().max() < tolerance
    for offset, token in enumerate((5, 6)):
        decoded = [Chunk(row, [token], len(text) + offset) for row, text in enumerate(texts)]
        logits = model.llama.forward(sequences.plan(decoded))
        assert logits is not None
        for row, text in enumerate(texts):
            assert (logits[row] - expected[row][len(text) + offset]).abs().max() < tolerance


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_fp32_is_transformers(tmp_path: Path, tied: bool, native: bool) -> None:
    directory = make_tiny_llama(tmp_path / "model", tied=tied)
    model, sequences = load(directory, native=native)
    check_against_oracle(directory, model, sequences, 1e-4)


def test_fp16_is_close(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    model, sequences = load(directory, "fp16")
    check_against_oracle(directory, model, sequences, 3e-2)


def test_gguf_is_transformers(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    model, sequences = load(write_gguf(directory, tmp_path / "tiny.gguf"))
    check_against_oracle(directory, model, sequences, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_relatives_are_transformers(tmp_path: Path, kind: str) -> None:
    directory = random_hf_model(tmp_path / kind, kind)
    model, sequences = load(directory)
    check_against_oracle(directory, model, sequences, 3e-4)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.bfloat16) for kind in KINDS), ("Llama", torch.float16)])
def test_shards_in_half_precision_are_transformers(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    directory = random_hf_model(tmp_path / kind, kind, dtype=dtype, shard_bytes=50_000)
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    model, sequences = load(directory)
    check_against_oracle(directory, model, sequences, 3e-4)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_relatives_in_gguf_are_transformers(tmp_path: Path, kind: str) -> None:
    directory = random_hf_model(tmp_path / kind, kind)
    model, sequences = load(write_gguf(directory, tmp_path / "tiny.gguf"))
    check_against_oracle(directory, model, sequences, 3e-4)


def test_rows_that_do_not_sample_cost_no_logits(tmp_path: Path) -> None:
    model, sequences = load(make_tiny_llama(tmp_path / "model"))
    texts = prompts(512)
    whole = model.run(sequences.plan([Chunk(3, texts[3]), Chunk(4, texts[4])], sampling_rows(2, logprobs=2)))
    nothing = model.run(sequences.plan([Chunk(0, texts[3][:20], sample=False), Chunk(1, texts[4][:50], sample=False)]))
    assert len(nothing.token_ids) == 0
    one = model.run(
        sequences.plan(
            [Chunk(1, texts[4][50:60], 50, sample=False), Chunk(0, texts[3][20:], 20)], sampling_rows(1, logprobs=2)
        )
    )
    assert one.token_ids.tolist() == whole.token_ids[:1].tolist()
    assert one.logprobs is not None and whole.logprobs is not None
    assert one.logprobs[0] == whole.logprobs[0]
    assert len(model.run(sequences.plan([])).token_ids) == 0


def test_the_fingerprint_tells_arithmetics_apart(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    first, _ = load(directory)
    again, _ = load(directory)
    other, _ = load(directory, "fp16")
    torch_only, _ = load(directory, native=False)
    assert first.info == again.info
    assert len({item.info.fingerprint for item in (first, other, torch_only)}) == (
        3 if first.backend.name != torch_only.backend.name else 2
    )
    assert len({item.info.version for item in (first, other, torch_only)}) == 1
    assert first.info.context_tokens == 512
    assert first.info.block_bytes == 2 * 2 * 16 * 2 * 16 * 4
