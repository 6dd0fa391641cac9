"""Random models of every architecture that is built here, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_hf_model(
    directory: Path,
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 1 << 30,
    head_size: int = 32,
    scale: float = 4.0,
) -> Path:
    """A random model with biases that are not zero and norms that are not one; "Llama-3" has its rotary scaling, no
    bias, and a head of its own. Matrices are `scale` times what transformers begins with."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_size,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    if kind == "Qwen2":
        del sizes["head_dim"]
    if kind == "Llama":
        sizes["attention_bias"] = True
    if kind == "Llama-3":
        sizes |= {"tie_word_embeddings": False, "rope_parameters": LLAMA_3_ROPE}
    name = kind.removesuffix("-3")
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
            else:
                parameter.mul_(scale)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_bytes)
    return directory
