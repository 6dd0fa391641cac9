"""The seam between kernels and whatever compiles and runs them: CuPy on a GPU, or the emulation on this CPU.

Both take the same sources, grids and packed arguments; what they take as addresses is memory of `device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from executor_svc.kernels.cuda import sources
from executor_svc.kernels.cuda.variants import Variant

Grid = tuple[int, int, int]
Packed = Sequence[np.generic]


class Module(Protocol):
    """The compiled kernels of one variant."""

    def run(self, kernel: str, grid: Grid, threads: int, packed: Packed, stream: int) -> None:
        """Starts a kernel behind what `stream` (a cudaStream_t, 0 for the default one) has to do. Nothing is waited
        for on a GPU; the emulation is done when the call returns."""


class Launcher(Protocol):
    """Compiles and runs."""

    name: str
    device: str
    """torch's name of the device whose memory it works on."""

    def describe(self) -> str:
        """What decides the bits of results beside the sources: for the fingerprint."""

    def module(self, variant: Variant) -> Module:
        """The kernels of a variant, compiled if need be: at start, never inside a step or a graph's capture."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a module, with its arguments' types as its source declares them."""

    module: Module
    name: str
    types: tuple[sources.Argument, ...]

    def __call__(self, grid: Grid, threads: int, arguments: Sequence[int | float], stream: int) -> None:
        """Packs and starts. A grid of nothing starts nothing."""
        if 0 in grid:
            return
        packed = [kind(value) for kind, value in zip(self.types, arguments, strict=True)]
        self.module.run(self.name, grid, threads, packed, stream)


def kernel(module: Module, name: str) -> Kernel:
    """The kernel of that name."""
    return Kernel(module, name, sources.arguments(name))
