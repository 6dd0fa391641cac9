"""Configurations: what is read from both kinds of file, and what is refused, in one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.model.config import BadModel, LlamaConfig, from_directory, from_gguf
from executor_svc.model.llama import rotary_tables
from tests.support.tiny_llama import make_tiny_llama

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def changed(directory: Path, **changes: Any) -> Path:
    """The tiny model with some keys of its config.json set; None removes a key."""
    make_tiny_llama(directory)
    values = json.loads((directory / "config.json").read_text())
    values.update(changes)
    values = {key: value for key, value in values.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def test_a_directory_is_read(tmp_path: Path) -> None:
    config = from_directory(make_tiny_llama(tmp_path, context=300))
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_size) == (2, 64, 4, 2, 16)
    assert (config.context_tokens, config.vocabulary, config.ffn) == (300, 512, 128)
    assert config.eos_ids == (2,)
    assert LlamaConfig.from_json(config.to_json()) == config


def test_the_generation_config_names_the_ends(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert from_directory(tmp_path).eos_ids == (2, 7)


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    assert from_directory(changed(tmp_path / "a", sliding_window=128)).context_tokens == 128
    assert from_directory(changed(tmp_path / "b", sliding_window=128, use_sliding_window=False)).context_tokens == 512


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "(none)"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_key_value_heads": 3}, "key-value heads"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rms_norm_eps": True}, "rms_norm_eps"),
        ({"rms_norm_eps": -1.0}, "epsilon -1"),
        ({"architectures": 5}, "(none)"),
        ({"architectures": [["LlamaForCausalLM"]]}, "['LlamaForCausalLM']"),
        ({"hidden_size": 64.5}, "whole number"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings"),
        ({"head_dim": 1e300}, "head_dim"),
        ({"head_dim": 10**9}, "head_dim"),
        ({"rope_theta": 0}, "rotary base 0"),
        ({"rope_scaling": ["linear"]}, "['linear']"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factors"),
        ({"rope_scaling": {**LLAMA3, "factor": 0}}, "scaling by 0"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "between 1.0 and 1.0"),
        ({"rope_scaling": LLAMA3, "rope_theta": -5}, "base -5"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, None]}, "eos_token_id"),
        ({"bos_token_id": {"a": 1}}, "bos_token_id"),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModel) as caught:
        from_directory(changed(tmp_path, **changes))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"architectures": ["SmolLM3ForCausalLM"]}, "architectures", "SmolLM3ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", {"quant_method": "awq"}),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type", "yarn"),
    ],
)
def test_a_refusal_names_field_and_value(tmp_path: Path, changes: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(BadModel) as caught:
        from_directory(changed(tmp_path, **changes))
    assert (caught.value.field, caught.value.value) == (field, str(value))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100000])
def test_a_broken_config_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadModel, match=r"config\.json"):
        from_directory(tmp_path)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        LLAMA3,
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_frequencies_are_those_of_transformers(tmp_path: Path, rope: dict[str, Any], key: str) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**rope, "rope_theta": 500.0}
    directory = changed(tmp_path, **{key: parameters, "rope_theta": 500.0 if key == "rope_scaling" else None})
    config = from_directory(directory)
    cosines, _ = rotary_tables(config.rope_base, config.rope_divisors, 400)
    module = LlamaRotaryEmbedding(AutoConfig.from_pretrained(directory))
    expected, _ = module(torch.zeros(1, 400, 64), torch.arange(400)[None])
    assert torch.allclose(cosines, expected[0, :, : config.head_size // 2], atol=1e-4)


def metadata(**changes: Any) -> dict[str, Any]:
    """Key-value pairs of a small GGUF file."""
    base = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": range(300),
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**base, **{key.replace("__", "."): value for key, value in changes.items()}}


def test_gguf_metadata_is_read() -> None:
    config = from_gguf("x.gguf", metadata(), tied=True, rope_divisors=())
    assert (config.vocabulary, config.head_size, config.tied, config.eos_ids) == (300, 16, True, (2,))
    assert config.rope_divisors == (1.0,) * 8
    scaled = from_gguf(
        "x.gguf", metadata(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0), True, ()
    )
    assert scaled.rope_divisors == (4.0,) * 8
    for older in (metadata(llama__rope__scale_linear=2.0), metadata(llama__rope__scaling__factor=2.0)):
        assert from_gguf("x.gguf", older, True, ()).rope_divisors == (2.0,) * 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "bert"}, "bert"),
        ({"llama__expert_count": 8}, "experts"),
        ({"llama__block_count": None}, "block_count"),
        ({"llama__rope__scaling__type": "yarn"}, "yarn"),
        ({"llama__attention__layer_norm_rms_epsilon": math.nan}, "epsilon"),
        ({"llama__rope__dimension_count": 8}, "8 of the 16"),
        ({"tokenizer__ggml__tokens": 7}, "vocabulary"),
        ({"tokenizer__ggml__eos_token_id": range(3)}, "eos_token_id"),
    ],
)
def test_foreign_gguf_metadata_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModel) as caught:
        from_gguf("x.gguf", metadata(**changes), tied=True, rope_divisors=())
    assert words in caught.value.message
