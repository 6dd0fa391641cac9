"""Runs the kernels on an NVIDIA GPU through CuPy, which compiles them with NVRTC and caches what it compiled."""

from __future__ import annotations

from typing import Any

from executor_svc.kernels.cuda import sources
from executor_svc.kernels.cuda.launch import Grid, Module, Packed
from executor_svc.kernels.cuda.variants import Variant

OPTIONS = ("-std=c++17", "--use_fast_math", "-lineinfo")
LEAST_CAPABILITY = 80
"""sm_80: mma.sync of bf16."""


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
