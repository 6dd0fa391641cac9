"""The model on whatever computes here: a GPU, a GPU that is emulated, or this machine's CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from executor_svc.attention_choice import Backend, Say, check_room, device_backend, find_device
from executor_svc.model.device_model import DeviceModel, build_device_model, own_type, pool_shape
from executor_svc.model.gguf_file import Progress
from executor_svc.model.linear import Arithmetic
from executor_svc.model.loader import load_weights, no_progress
from executor_svc.model.model import CpuModel
from jitney.errors import InvalidRequest

Known = TypeVar("Known", bound=str | None)
Precision = Literal["auto", "fp16", "bf16", "int16", "int8", "fp32"]
CPU_WEIGHTS: dict[str, Arithmetic | None] = {
    "auto": None,
    "fp16": "fp16",
    "int16": "int16",
    "int8": "int8",
    "fp32": "fp32",
}
CPU_KV = {"auto": "fp16", "fp16": "fp16", "fp32": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the executor's configuration says of the model. `emulated`: see attention_choice.py."""

    backend: Backend = "auto"
    emulated: bool = False
    fixed_splits: bool = False
    arithmetic: Precision = "auto"
    kv: Literal["auto", "fp16", "bf16", "fp32"] = "auto"
    pool_blocks: int
    block_tokens: int = 16
    max_step_tokens: int = 2048
    max_step_rows: int = 256
    native: bool = True


def open_model(
    path: Path, options: ModelOptions, cache_dir: Path | None, say: Say, progress: Progress = no_progress
) -> CpuModel | DeviceModel:
    """Loads it. Raises BadModel, or InvalidRequest for a precision that is not to be had."""
    device = find_device(options.backend, options.emulated, say)
    if device is None:
        return CpuModel.load(
            path,
            arithmetic=_on_cpu(CPU_WEIGHTS, options.arithmetic, "arithmetic"),
            kv=_on_cpu(CPU_KV, options.kv, "kv"),
            pool_blocks=options.pool_blocks,
            block_tokens=options.block_tokens,
            max_step_tokens=options.max_step_tokens,
            max_step_rows=options.max_step_rows,
            cache_dir=cache_dir,
            progress=progress,
            native=options.native,
        )
    if options.arithmetic in ("int8", "int16"):
        what = f"--arithmetic {options.arithmetic} is for CPUs: on a GPU choose bf16, fp16 or fp32"
        raise InvalidRequest(what, field="arithmetic", limit="bf16, fp16, fp32", value=options.arithmetic)
    weights = load_weights(path, cache_dir, progress)
    arithmetic = own_type(weights) if options.arithmetic == "auto" else options.arithmetic
    shape = pool_shape(weights, arithmetic, options.kv, options.pool_blocks, options.block_tokens)
    check_room(device, shape, sum(tensor.numel() for tensor in weights.tensors.values()) * shape.dtype.itemsize)
    backend = device_backend(device, shape, weights.config.heads, say, fixed_splits=options.fixed_splits)
    return build_device_model(weights, backend, arithmetic, max_rows=options.max_step_rows, progress=progress)


def _on_cpu(known: Mapping[str, Known], wanted: str, field: str) -> Known:
    if wanted not in known:
        what = f"--{field} {wanted} is for GPUs: on a CPU choose one of {', '.join(known)}"
        raise InvalidRequest(what, field=field, limit=", ".join(known), value=wanted)
    return known[wanted]
