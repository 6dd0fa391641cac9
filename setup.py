"""Builds what a checkout lacks: the gRPC stubs, and the C kernels where a compiler is found. See pyproject.toml."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def load(path: str) -> ModuleType:
    """A module of the tree, without importing its package and what that needs."""
    name = path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Compiles the kernels beside their sources, whence they go into the wheel."""

    def run(self) -> None:
        """Without a compiler the install goes on: torch takes the kernels' place."""
        load("executor_svc/kernels/build.py").main()
        super().run()


class PlatformDistribution(Distribution):
    """Holds compiled code: its wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        """Yes."""
        return True


# Before setup: the stubs' packages must exist when packages are looked for.
load("jitney/build_stubs.py").build()
setup(cmdclass={"build_py": BuildWithKernels}, distclass=PlatformDistribution)
