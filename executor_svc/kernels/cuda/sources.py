"""The kernels' sources as a compiler takes them: one text a variant, and the arguments of each kernel as it says."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
KERNELS = ("write_kv", "move_blocks", "merge_splits", "paged_decode")
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)

Argument = type[np.int64] | type[np.int32] | type[np.float32] | type[np.uint64]
"""Of a kernel: its type when packed, 8 bytes unsigned for a pointer."""
_SCALARS: dict[str, Argument] = {"i64": np.int64, "int": np.int32, "float": np.float32}


def text(folder: Path = HERE, name: str = "kernels.cu") -> str:
    """A source with what it includes in its place, but for the emulation, so that a compiler that caches by text caches
    rightly."""
    return _INCLUDE.sub(lambda found: text(folder, found[1]), (folder / name).read_text(encoding="utf-8"))


def digest(folder: Path = HERE) -> str:
    """16 hex digits over all sources, the emulation's too."""
    emulation = sorted((folder / "emulation").glob("*.h"))
    parts = [text(folder), *(path.read_text(encoding="utf-8") for path in emulation)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def arguments(kernel: str, folder: Path = HERE) -> tuple[Argument, ...]:
    """The types of a kernel's arguments, read off its declaration. KeyError for a type that no launcher passes."""
    found = re.search(rf"\b__global__[^;{{]*?\b{kernel}\(([^)]*)\)", text(folder))
    if found is None:
        raise ValueError(f"no kernel {kernel} in {folder}")
    declared = [" ".join(one.split()) for one in found[1].split(",")]
    return tuple(np.uint64 if "*" in one else _SCALARS[one.rpartition(" ")[0]] for one in declared)
