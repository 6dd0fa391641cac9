"""A random Llama of a few hundred kilobytes, in the files of a Hugging Face model directory.

Made in well under a second, the same bytes for the same arguments. Its tokenizer is a byte-level BPE, its chat
template ChatML. What it says is noise, but noise that differs with every prompt.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(3)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog while a small language model answers many people at once",
    "every request owns its tokens and every block of the cache has one writer and any number of readers",
    "how many roads must a scheduler walk down before you call it a server that never loses a token",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen",
)


def make_tiny_llama(
    directory: Path,
    *,
    vocab: int = 512,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 512,
    seed: int = 0,
    tied: bool = False,
) -> Path:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json; returns `directory`."""
    if vocab < 300:
        raise ValueError(f"vocab must hold 256 bytes, the special tokens and some merges: at least 300, not {vocab}")
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = _weights(vocab, layers, hidden, heads, kv_heads, seed, tied)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(vocab).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return directory


def _weights(
    vocab: int, layers: int, hidden: int, heads: int, kv_heads: int, seed: int, tied: bool
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)

    def norm() -> torch.Tensor:
        return torch.randn(hidden, generator=generator).mul_(0.1).add_(1.0)

    kv_width = kv_heads * (hidden // heads)
    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = norm()
        tensors[prefix + "self_attn.q_proj.weight"] = matrix(hidden, hidden)
        tensors[prefix + "self_attn.k_proj.weight"] = matrix(kv_width, hidden)
        tensors[prefix + "self_attn.v_proj.weight"] = matrix(kv_width, hidden)
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(hidden, hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = norm()
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(2 * hidden, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(2 * hidden, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, 2 * hidden)
    tensors["model.norm.weight"] = norm()
    if not tied:
        tensors["lm_head.weight"] = 3 * matrix(vocab, hidden)
    return tensors


def _tokenizer(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    missing = vocab - tokenizer.get_vocab_size()
    if missing > 0:  # the corpus has no more merges to give: fill up, so that every id decodes to text
        tokenizer.add_tokens([f"<extra{index}>" for index in range(missing)])
    return tokenizer
