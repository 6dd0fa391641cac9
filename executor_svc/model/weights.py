"""Weights in memory: one mapping from tensor names to tensors, whatever file they came from.

Names are those of Hugging Face's Llama. Tensors may be views of a mapped file, in any float type; the linear layers
take their own packed copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from executor_svc.model.config import BadModel, LlamaConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one model. `version` is the digest of its weights and tokenizer files, hex."""

    name: str
    version: str
    config: LlamaConfig
    tensors: Mapping[str, torch.Tensor]

    def layer(self, layer: int, part: str) -> torch.Tensor:
        """A tensor of a layer, e.g. part "self_attn.q_proj.weight"."""
        return self.tensors[f"model.layers.{layer}.{part}"]

    def layer_or_none(self, layer: int, part: str) -> torch.Tensor | None:
        """The same for a tensor that not every model has."""
        return self.tensors.get(f"model.layers.{layer}.{part}")

    @property
    def head(self) -> torch.Tensor:
        """`[vocabulary, hidden]`, the embedding itself if they are tied."""
        return self.tensors[EMBEDDING if self.config.tied else HEAD]


def required_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the forward pass reads, but for biases, with its shape."""
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocabulary, config.hidden),
        FINAL_NORM: (config.hidden,),
    }
    if not config.tied:
        shapes[HEAD] = (config.vocabulary, config.hidden)
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (config.hidden,),
        "self_attn.q_proj.weight": (queries, config.hidden),
        "self_attn.k_proj.weight": (keys, config.hidden),
        "self_attn.v_proj.weight": (keys, config.hidden),
        "self_attn.o_proj.weight": (config.hidden, queries),
        "post_attention_layernorm.weight": (config.hidden,),
        "mlp.gate_proj.weight": (config.ffn, config.hidden),
        "mlp.up_proj.weight": (config.ffn, config.hidden),
        "mlp.down_proj.weight": (config.hidden, config.ffn),
    }
    if config.qk_norm:
        layer_shapes["self_attn.q_norm.weight"] = (config.head_size,)
        layer_shapes["self_attn.k_norm.weight"] = (config.head_size,)
    for layer in range(config.layers):
        for part, shape in layer_shapes.items():
            shapes[f"model.layers.{layer}.{part}"] = shape
    return shapes


def check_tensors(source: str, config: LlamaConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises BadModel for the first tensor that is missing, has another shape or type than the network's, or is none of
    the network's where it would change what the model says."""
    needed = required_shapes(config)
    for name in tensors:
        if name.endswith(("q_norm.weight", "k_norm.weight", "lm_head.bias")) and name not in needed:
            what = f"{source}: tensor {name} is not part of the architecture {config.architecture} as it is built here"
            raise BadModel(what, field=name)
    for name, shape in needed.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise BadModel(f"{source}: tensor {name} is missing", field=name)
        if tuple(tensor.shape) != shape:
            raise BadModel(
                f"{source}: tensor {name} is {tuple(tensor.shape)}, the configuration wants {shape}",
                field=name,
                limit=shape,
                value=tuple(tensor.shape),
            )
        _check_type(source, name, tensor)
        bias = tensors.get(name.removesuffix("weight") + "bias")
        if bias is not None and (len(shape) != 2 or tuple(bias.shape) != shape[:1]):
            raise BadModel(f"{source}: the bias beside {name} is {tuple(bias.shape)}", field=name)
        if bias is not None:
            _check_type(source, name.removesuffix("weight") + "bias", bias)


def _check_type(source: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise BadModel(
            f"{source}: tensor {name} is {tensor.dtype}, not a float type that is read here",
            field=name,
            value=tensor.dtype,
        )
