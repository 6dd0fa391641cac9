"""A model out of a local Hugging Face directory: one model.safetensors, or shards with an index."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from executor_svc.model.config import BadModel, LlamaConfig, from_directory

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def weight_files(directory: Path) -> list[str]:
    """Names of the files that hold the weights. Raises BadModel if there are none, or the index is unusable."""
    if (directory / INDEX).exists():
        try:
            names = sorted(set(json.loads((directory / INDEX).read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise BadModel(f"{directory / INDEX} is not an index of shards", field=INDEX) from None
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise BadModel(f"{directory / INDEX} names files outside the directory", field=INDEX)
    else:
        names = [SINGLE]
    for name in names:
        if not (directory / name).is_file():
            raise BadModel(f"{directory / name} is missing", field=name)
    return names


def version_files(directory: Path) -> list[str]:
    """Names of all files that decide what the model says: weights, configuration, tokenizer."""
    return weight_files(directory) + [name for name in _BESIDE if (directory / name).is_file()]


def read_directory(directory: Path) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    """Configuration and tensors, mapped from the files. Raises BadModel."""
    config = from_directory(directory)
    tensors: dict[str, torch.Tensor] = {}
    for name in weight_files(directory):
        tensors.update(read_safetensors(directory / name))
    return config, tensors


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of one file. Raises BadModel."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError, ValueError) as error:
        raise BadModel(f"{path} is truncated or no safetensors file: {error}", field=path.name) from None
