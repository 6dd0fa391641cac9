"""The model's weights in half precision as a Hugging Face folder, for peers that read no GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.environments import NotToBeHad
from executor_svc.model.loader import load_weights
from jitney.serving import config


def hf_folder(model: Path) -> Path:
    """Made once, in the cache directory: config.json and model.safetensors, no tokenizer. Raises NotToBeHad."""
    cache = config.cache_dir()
    folder = cache / "bench-weights" / model.stem
    if (folder / "config.json").exists():
        return folder
    weights = load_weights(model, cache)
    sizes = weights.config
    if sizes.architecture != "llama":
        raise NotToBeHad(f"the folder for other libraries is made of Llama models only, not of {sizes.architecture}")
    described: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.context_tokens,
        "rms_norm_eps": sizes.norm_epsilon,
        "rope_theta": sizes.rope_base,
        "tie_word_embeddings": sizes.tied,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in weights.tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described))
    return folder
