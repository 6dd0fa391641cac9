"""Runs the kernels on an NVIDIA GPU through CuPy, which compiles them with NVRTC and caches what it compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from executor_svc.kernels.cuda import sources
from executor_svc.kernels.cuda.launch import Grid, Module, Packed
from executor_svc.kernels.cuda.variants import Variant

OPTIONS = ("-std=c++17", "--use_fast_math", "-lineinfo")
LEAST_CAPABILITY = 80
"""sm_80: mma.sync of bf16."""
_PROBE = 'extern "C" __global__ void probe(int *to, int value) { *to = value; }'


class NoGpu(Exception):
    """The kernels do not run here; the message is one sentence."""


def import_cupy() -> Any:
    """CuPy, with a GPU that it can use. Raises NoGpu."""
    try:
        import cupy
    except ImportError as error:
        raise NoGpu("CuPy is not installed: pip install 'jitney[gpu]' brings it") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise NoGpu(f"CuPy finds no GPU: {error}") from error
    if count == 0:
        raise NoGpu("CuPy finds no GPU")
    return cupy


class CupyLauncher:
    """See Launcher. Works on the current device."""

    name = "cupy"
    device = "cuda"

    def __init__(self) -> None:
        """Raises NoGpu."""
        self._cupy = import_cupy()
        self.capability = int(self._cupy.cuda.Device().compute_capability)
        if self.capability < LEAST_CAPABILITY:
            raise NoGpu(f"the GPU is of capability {self.capability}, the kernels need {LEAST_CAPABILITY} or more")
        try:
            right = _probe(self._cupy)
        except Exception as error:  # a library that is not found, another driver's code, a folder that is read-only
            raise NoGpu(f"CuPy cannot compile and run a kernel here: {str(error).partition(chr(10))[0]}") from error
        if not right:
            raise NoGpu("a kernel that CuPy launches does not write to torch's memory")
        self._modules: dict[Variant, Module] = {}

    def describe(self) -> str:
        """See Launcher."""
        nvrtc = ".".join(map(str, self._cupy.cuda.nvrtc.getVersion()))
        return f"cupy-sm_{self.capability} nvrtc={nvrtc} kernels={sources.digest()}"

    def module(self, variant: Variant) -> Module:
        """See Launcher."""
        if variant not in self._modules:
            self._modules[variant] = CupyModule(self._cupy, variant)
        return self._modules[variant]


def _probe(cupy: Any) -> bool:
    """Compiles a kernel and lets it write to torch's memory, on torch's stream."""
    kernel = cupy.RawModule(code=_PROBE, options=OPTIONS, backend="nvrtc").get_function("probe")
    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        kernel((1, 1, 1), (1,), (np.uint64(target.data_ptr()), np.int32(42)))
    return int(target) == 42


class CupyModule:
    """See Module."""

    def __init__(self, cupy: Any, variant: Variant) -> None:
        self._cupy = cupy
        module = cupy.RawModule(code=sources.text(), options=(*OPTIONS, *variant.defines), backend="nvrtc")
        self._kernels = {name: module.get_function(name) for name in sources.KERNELS}
        self._streams: dict[int, Any] = {}

    def run(self, kernel: str, grid: Grid, threads: int, packed: Packed, stream: int) -> None:
        """See Module."""
        if stream not in self._streams:
            self._streams[stream] = self._cupy.cuda.ExternalStream(stream)
        with self._streams[stream]:
            self._kernels[kernel](grid, (threads,), tuple(packed))
