"""A random model's directory as a GGUF file, as llama.cpp's converter would write it.

Rows of Q and K are in pairs for Llama; other architectures keep them.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(directory: Path, path: Path) -> Path:
    """Writes the model of `directory` to `path`: float32, without a tokenizer."""
    config = json.loads((directory / "config.json").read_text())
    kind = config["model_type"]
    tensors = load_file(directory / "model.safetensors")
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    if config.get("eos_token_id") is not None:
        writer.add_eos_token_id(config["eos_token_id"])
    for name, tensor in tensors.items():
        if name in _TOP:
            writer.add_tensor(_TOP[name], tensor.numpy())
            continue
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        part, _, role = rest.rpartition(".")
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
        if heads is not None and kind == "llama":
            tensor = _paired(tensor, config[heads])
        writer.add_tensor(f"blk.{layer}.{_NAMES[part]}.{role}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _paired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Two halves of each head interleaved, so that what rotates together lies side by side."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()
