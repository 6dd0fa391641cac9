"""Models of the GPU backends with the CPU as their device."""

from __future__ import annotations

from pathlib import Path

import torch

from executor_svc.attention_torch_cuda import TorchCudaAttention
from executor_svc.model.device_model import DeviceModel, build_device_model, pool_shape
from executor_svc.model.loader import load_weights

CPU = torch.device("cpu")


def torch_cuda_model(path: Path, arithmetic: str = "fp32", *, blocks: int, max_rows: int = 8) -> DeviceModel:
    """The model over `torch_cuda`, computed here."""
    weights = load_weights(path)
    backend = TorchCudaAttention(pool_shape(weights, arithmetic, "auto", blocks, 16), CPU)
    return build_device_model(weights, backend, arithmetic, max_rows=max_rows)
