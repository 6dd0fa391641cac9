"""Dequantised weights on disk, so that every start but the first takes seconds.

One safetensors file a model, named by the digest of its source and the version of this format. Its header repeats
both, and holds the configuration and a checksum of it and of the tensors. Whatever does not fit is no error: the file
is written anew.
"""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from executor_svc.model.atomic_file import write_atomically
from executor_svc.model.config import BadModel, LlamaConfig

FORMAT = "jitney-weights-1"


def cache_path(cache_dir: Path, digest: str) -> Path:
    """Where the weights of the source with this digest lie."""
    return cache_dir / "weights" / f"{digest[:32]}.{FORMAT}.safetensors"


def load(cache_dir: Path, digest: str) -> tuple[LlamaConfig, dict[str, torch.Tensor]] | None:
    """What was stored for this source, or None if there is nothing whole."""
    path = cache_path(cache_dir, digest)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT or header.get("source") != digest:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        if header.get("checksum") != _checksum(header["config"], tensors):
            return None
        return LlamaConfig.from_json(header["config"]), tensors
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, BadModel):
        return None


def store(cache_dir: Path, digest: str, config: LlamaConfig, tensors: dict[str, torch.Tensor]) -> bool:
    """Writes the file as a whole or not at all; returns whether it is there."""
    text = config.to_json()
    header = {"format": FORMAT, "source": digest, "config": text, "checksum": _checksum(text, tensors)}

    def write(path: Path) -> None:
        try:
            save_file(tensors, path, metadata=header)
        except SafetensorError as error:  # what the package makes of a full disk
            raise OSError(str(error)) from error

    return write_atomically(cache_path(cache_dir, digest), write)


def _checksum(config: str, tensors: dict[str, torch.Tensor]) -> str:
    total = xxhash.xxh3_128(config.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
