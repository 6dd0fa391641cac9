"""A model out of a GGUF file: metadata, dequantised tensors, rows of Q and K back in their own order.

Reading through the `gguf` package takes seconds, since it visits every token string in Python; weights_cache.py
spares every start but the first. Quantised tensors are dequantised to fp16, others keep their type.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.model.config import BadModel, LlamaConfig, from_gguf
from executor_svc.model.weights import EMBEDDING, FINAL_NORM, HEAD

Progress = Callable[[str, float], None]
MAGIC = b"GGUF"
_UNQUANTISED = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}
_TOP = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
    "output.bias": "lm_head.bias",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FACTORS = "rope_freqs.weight"


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does. Raises BadModel if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except FileNotFoundError:
        raise BadModel(f"{path} is missing", field=path.name) from None
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror}", field=path.name) from None


def read_gguf(path: Path, progress: Progress) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    """Configuration and tensors by their Hugging Face names. Raises BadModel."""
    progress("reading the GGUF file", 0.0)
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: _value(field) for name, field in reader.fields.items()}
        entries = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the package lets out whatever a broken file makes numpy raise
        raise BadModel(f"{path} is truncated or damaged: {error}", field=path.name) from None
    if reader.byte_order == "S":
        raise BadModel(f"{path} holds numbers in the byte order of another kind of machine", field=path.name)
    if metadata.get("split.count", 1) not in (0, 1):
        raise BadModel(f"{path} is one part of a split model; join the parts first", field="split.count")
    factors = _dequantise(path, entries[_FACTORS]) if _FACTORS in entries else torch.empty(0)
    divisors = tuple(factors.flatten().tolist())
    config = from_gguf(str(path), metadata, "output.weight" not in entries, divisors)
    tensors: dict[str, torch.Tensor] = {}
    for count, (name, entry) in enumerate(entries.items()):
        progress("dequantising the weights", count / len(entries))
        target = _target(name)
        if target is None:
            continue
        tensor = _dequantise(path, entry)
        if config.architecture == "llama" and ".attn_q." in name:
            tensor = _unpermuted(tensor, config.heads)
        elif config.architecture == "llama" and ".attn_k." in name:
            tensor = _unpermuted(tensor, config.kv_heads)
        tensors[target] = tensor.contiguous()
    return config, tensors


def _value(field: gguf.ReaderField) -> Any:
    """Scalars and strings as such; of an array only how long it is, as a range: its strings take seconds."""
    if field.types and field.types[0] == gguf.GGUFValueType.ARRAY:
        return range(len(field.data))
    return field.contents()


def _target(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one that the network does not read."""
    if name in _TOP:
        return _TOP[name]
    pieces = name.split(".")
    if len(pieces) != 4 or pieces[0] != "blk" or pieces[2] not in _PARTS:
        return None
    return f"model.layers.{pieces[1]}.{_PARTS[pieces[2]]}.{pieces[3]}"


def _dequantise(path: Path, entry: gguf.ReaderTensor) -> torch.Tensor:
    kind = entry.tensor_type
    shape = [int(size) for size in reversed(entry.shape.tolist())]
    if kind in _UNQUANTISED:
        raw = torch.from_numpy(np.array(entry.data).view(np.uint8).reshape(-1))
        return raw.view(_UNQUANTISED[kind]).reshape(shape)
    try:
        values: NDArray[np.float32] = gguf.dequantize(entry.data, kind)
    except NotImplementedError:
        raise BadModel(
            f"{path}: tensor {entry.name} is {kind.name}, which is not read here", field=entry.name
        ) from None
    return torch.from_numpy(values).reshape(shape).to(torch.float16)


def _unpermuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (or a bias) of each head from pairs that rotate together, side by side, to two halves. A tensor that does
    not divide is left as it is: it has not the shape that the configuration wants."""
    if tensor.dim() == 0 or tensor.shape[0] % (2 * heads):
        return tensor
    split = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)
