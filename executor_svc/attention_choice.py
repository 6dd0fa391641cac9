"""Which attention backend this machine can serve with: found by trying it, never by a version.

Without a GPU the CPU's serves, without CuPy (`pip install 'jitney[gpu]'`) or kernels for a model's shape `torch_cuda`
does; one sentence says why. On request the GPU backends run with this CPU as their device and the kernels emulated:
the whole executor can be tried so, if slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from executor_svc.attention import KVShape
from executor_svc.attention_cupy_cuda import CupyCudaAttention
from executor_svc.attention_device import DeviceAttention
from executor_svc.attention_torch_cuda import TorchCudaAttention
from executor_svc.copies_guard import InUse
from executor_svc.kernels.build import BuildError
from executor_svc.kernels.cuda.cupy_launcher import CupyLauncher, NoGpu
from executor_svc.kernels.cuda.emulated_launcher import EmulatedLauncher
from executor_svc.kernels.cuda.launch import Launcher
from executor_svc.kernels.cuda.variants import variant_for, why_not
from jitney.errors import InvalidRequest

Backend = Literal["auto", "cpu", "torch_cuda", "cupy_cuda"]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Device:
    """Where a GPU backend computes. `launcher`: of the kernels; None: torch alone."""

    device: torch.device
    launcher: Launcher | None
    emulated: bool = False


def find_device(wanted: Backend, emulated: bool, say: Say) -> Device | None:
    """The device of a GPU backend, or None: the CPU's serves. `say` gets a sentence for each thing that is missing."""
    if wanted == "cpu":
        return None
    if emulated:
        device = torch.device("cpu")
        return Device(device, EmulatedLauncher() if wanted != "torch_cuda" else None, emulated=True)
    if fault := cuda_fault():
        say(f"no GPU backend runs here, the CPU backend serves: {fault}")
        return None
    launcher: Launcher | None = None
    if wanted != "torch_cuda":
        try:
            launcher = CupyLauncher()
        except NoGpu as error:
            say(f"the GPU kernels do not run here, torch_cuda serves: {error}")
    return Device(torch.device("cuda", torch.cuda.current_device()), launcher)


@cache
def cuda_fault() -> str:
    """Why torch computes on no GPU here; empty: it does."""
    if not torch.backends.cuda.is_built():
        return "this build of torch is without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    try:
        if float(torch.ones(64, device="cuda").sum()) != 64.0:
            return "the GPU does not add up"
    except RuntimeError as error:
        return f"torch cannot compute on the GPU: {str(error).splitlines()[0]}"
    return ""


def check_room(device: Device, shape: KVShape, weight_bytes: int) -> None:
    """InvalidRequest unless the GPU has room for the pool and the weights."""
    if device.device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device.device)
    fit = max(0, free - weight_bytes) // shape.block_bytes
    if shape.blocks > fit:
        what = (
            f"--pool-blocks {shape.blocks} of {shape.block_bytes} bytes do not fit beside {weight_bytes >> 20} MiB of "
            f"weights into {free >> 20} MiB of free GPU memory: at most {fit}, and steps need some of it"
        )
        raise InvalidRequest(what, field="pool_blocks", limit=fit, value=shape.blocks)


def device_backend(
    device: Device, shape: KVShape, query_heads: int, say: Say, *, fixed_splits: bool = False
) -> DeviceAttention:
    """The backend with a fresh pool: our kernels where they run and have the shape, or torch's."""
    backend: DeviceAttention | None = None
    if device.launcher is not None:
        if variant_for(shape, query_heads) is None:
            say(f"torch_cuda serves: {why_not(shape, query_heads)}")
        else:
            try:
                backend = CupyCudaAttention(shape, query_heads, device.launcher, fixed_splits=fixed_splits)
            except BuildError as error:
                say(f"torch_cuda serves: the emulated kernels cannot be built: {error}")
    if backend is None:
        backend = TorchCudaAttention(shape, device.device)
    if device.emulated:
        backend.in_use = InUse()
    return backend
