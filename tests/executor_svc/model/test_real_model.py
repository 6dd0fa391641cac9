"""The default model against transformers in fp32 on the same dequantised weights, teacher-forced on English text."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.model.linear import best_arithmetic
from executor_svc.model.loader import load_weights
from executor_svc.model.model import CpuModel
from executor_svc.tokenizer import load_tokenizer
from tests.support.default_model import default_cache, default_model
from tests.support.step_plans import Chunk, Sequences

PROMPTS = 50
TOKENS = 128
FP16_ERROR = 0.15  # of a logit, from keys and values in fp16; the largest seen was 0.083


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """`[PROMPTS][TOKENS]` ids of prose: Python's own language reference."""
    tokenizer = load_tokenizer(default_model())
    texts = sorted(topics.values(), key=lambda text: (-len(text), text))[:PROMPTS]
    return tuple(tuple(tokenizer.encode(text[:2000]).tolist()[:TOKENS]) for text in texts)


@cache
def oracle() -> Any:
    """transformers' Llama with our weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = load_weights(default_model(), default_cache())
    config = weights.config
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocabulary,
                hidden_size=config.hidden,
                intermediate_size=config.ffn,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                max_position_embeddings=config.context_tokens,
                rms_norm_eps=config.norm_epsilon,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
                tie_word_embeddings=True,
            )
        )
    model = model.to_empty(device="cpu")
    model.model.rotary_emb.__init__(model.config)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.tensors.items()}, strict=False)
    model.tie_weights()
    return model


def expected_logits(prompt: tuple[int, ...]) -> torch.Tensor:
    """`[TOKENS, vocabulary]`."""
    with torch.inference_mode():
        logits: torch.Tensor = oracle()(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits


def forced_logits(model: CpuModel, sequences: Sequences, prompt: tuple[int, ...]) -> torch.Tensor:
    """`[TOKENS, vocabulary]`: one row a token, all in one step, since each is written before any attends."""
    logits = model.llama.forward(sequences.plan([Chunk(0, [token], at) for at, token in enumerate(prompt)]))
    assert logits is not None
    return logits


def load(arithmetic: Any, kv: str, sequences: Sequences) -> CpuModel:
    return CpuModel.load(
        default_model(), arithmetic=arithmetic, kv=kv, pool_blocks=sequences.blocks, cache_dir=default_cache()
    )


def compare(count: int) -> None:
    """fp32 within 1e-3; where packed weights would choose another token, the two best lie closer than their error."""
    sequences = Sequences(1, TOKENS)
    exact, packed = load("fp32", "fp32", sequences), load(best_arithmetic(), "fp16", sequences)
    worst = worst_packed = 0.0
    for prompt in prompts()[:count]:
        assert len(prompt) == TOKENS
        expected = expected_logits(prompt)
        worst = max(worst, float((forced_logits(exact, sequences, prompt) - expected).abs().max()))
        half = forced_logits(packed, sequences, prompt)
        worst_packed = max(worst_packed, float((half - expected).abs().max()))
        parted = torch.nonzero(half.argmax(-1) != expected.argmax(-1)).flatten()
        best = expected[parted].topk(2).values
        assert (best[:, 0] - best[:, 1] < 2 * FP16_ERROR).all()
    print(f"\nlargest difference of a logit: fp32 {worst:.2e}, packed {worst_packed:.2e}")
    assert worst < 1e-3
    assert worst_packed < FP16_ERROR


def test_a_few_prompts_against_transformers() -> None:
    compare(4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_prompts_against_transformers() -> None:
    compare(PROMPTS)


def test_real_rows_do_not_feel_each_other() -> None:
    sequences = Sequences(8, 96)
    model = load(best_arithmetic(), "fp16", sequences)
    texts = [list(prompt[:90]) for prompt in prompts()[:6]]
    alone = []
    for text in texts[:3]:
        model.llama.forward(sequences.plan([Chunk(7, text[:-1], sample=False)]))
        alone.append(model.llama.forward(sequences.plan([Chunk(7, text[-1:], len(text) - 1)])))
    together: dict[int, torch.Tensor] = {}
    generator = np.random.default_rng(0)
    done = [0] * len(texts)
    while min(done) < 90:
        chunks = []
        for row, text in enumerate(texts):
            size = min(90 - done[row], int(generator.integers(0, 40)))
            if size:
                chunks.append(Chunk(row, text[done[row] : done[row] + size], done[row]))
                done[row] += size
        if chunks:
            logits = model.llama.forward(sequences.plan(chunks))
            assert logits is not None
            together.update((c.sequence, logits[i].clone()) for i, c in enumerate(chunks) if done[c.sequence] == 90)
    for row, expected in enumerate(alone):
        assert expected is not None
        assert torch.equal(expected[0], together[row])
