"""Runs the kernels on this CPU: their own source, built by a C++ compiler behind emulation/emulation.h."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

from executor_svc.kernels.build import BuildError
from executor_svc.kernels.cuda import sources
from executor_svc.kernels.cuda.launch import Grid, Module, Packed
from executor_svc.kernels.cuda.variants import Variant

COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-unknown-pragmas", "-DEMULATED")
COMPILE_TIMEOUT_S = 300


class EmulatedFault(Exception):
    """A kernel did what a GPU would not survive, or would not notice: the message says what, and which thread."""


def find_compiler() -> str | None:
    """The first C++ compiler on the path."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


class EmulatedLauncher:
    """See Launcher. `folder`: the sources. Each launch runs the threads in another order, the same ones every time."""

    name = "emulated"
    device = "cpu"

    def __init__(self, folder: Path = sources.HERE) -> None:
        self._folder = folder
        self._modules: dict[Variant, Module] = {}

    def describe(self) -> str:
        """See Launcher."""
        return f"emulated kernels={sources.digest(self._folder)}"

    def module(self, variant: Variant) -> Module:
        """See Launcher. Raises BuildError where no C++ compiler builds it."""
        if variant not in self._modules:
            self._modules[variant] = EmulatedModule(build(variant, self._folder))
        return self._modules[variant]


class EmulatedModule:
    """See Module. One launch at a time."""

    def __init__(self, library: Path) -> None:
        handle = ctypes.CDLL(str(library))
        self._kernels = {name: handle[f"emulated_{name}"] for name in sources.KERNELS}
        for entry in self._kernels.values():
            entry.restype = ctypes.c_char_p
            entry.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
        self._launches = 0

    def run(self, kernel: str, grid: Grid, threads: int, packed: Packed, stream: int) -> None:
        """See Module; the stream is nothing here. Raises EmulatedFault."""
        values = [np.array(value) for value in packed]
        addresses = np.array([value.ctypes.data for value in values], np.uint64)
        shape = np.array([*grid, threads, 1, 1], np.uint32)
        self._launches += 1
        fault = self._kernels[kernel](shape.ctypes.data, self._launches, addresses.ctypes.data)
        if fault is not None:
            raise EmulatedFault(f"{kernel}: {fault.decode()}")


def build(variant: Variant, folder: Path = sources.HERE) -> Path:
    """The library of a variant, built beside its sources unless it is there. Raises BuildError."""
    target = folder / f"_emulated-{variant}-{sources.digest(folder)}.so"
    if target.exists():
        return target
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    fresh = target.with_suffix(f".{os.getpid()}.tmp")
    command = (compiler, *FLAGS, *variant.defines, "-x", "c++", str(folder / "kernels.cu"), "-o", str(fresh))
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise BuildError(f"{Path(compiler).name} failed: {done.stderr.strip()[:2000]}")
    fresh.replace(target)
    for other in folder.glob(f"_emulated-{variant}-*.so"):
        if other != target:
            other.unlink(missing_ok=True)
    return target
