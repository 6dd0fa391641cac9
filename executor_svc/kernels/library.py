"""The loaded kernel library: at most one a process, built on first use where no install has built it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch  # loads the OpenMP runtime that the library shares

from executor_svc.kernels import build

log = logging.getLogger(__name__)

pointer = ctypes.c_void_p
i64 = ctypes.c_int64
i32 = ctypes.c_int32
f32 = ctypes.c_float

SIGNATURES: dict[str, tuple[type[Any], ...]] = {
    "rms_norm": (pointer, i64, pointer, f32, pointer, i64, i64, i64, i32),
    "rotary": (pointer, i64, i64, pointer, i64, i64, i64, pointer, pointer, pointer, i64, i32),
    "silu_mul": (pointer, i64, pointer, i64, i64, i64, i32),
    "argmax": (pointer, i64, pointer, i64, i64, i32),
    "linear": (pointer, pointer, i64, pointer, i64, i64, i32, pointer, pointer, i32),
    "linear_panel": (),
    "layers": (pointer, pointer),
    "layer_phases": (),
    "attend": (pointer,),
    "attend_scratch": (i64, i64, i64),
    "attend_part": (i64, i64),
    "write_kv": (pointer, i64, i64, i64, i64, i64, pointer, pointer, i64, pointer, i64, i64, i32),
    "sample": (pointer,),
    "sample_scratch": (i64,),
    "check_table": (pointer, i64, pointer, pointer, i64, i64, i64),
    "copy_blocks": (pointer, pointer, i64, i64, pointer),
    "hash_blocks": (pointer, i64, i64, pointer),
    "move_rows": (pointer, pointer, pointer, pointer, i64, i64, i32),
}
"""Arguments of every kernel, as in its C source."""
RETURNS: dict[str, type[Any]] = {
    "attend_scratch": i64,
    "attend_part": i64,
    "check_table": i64,
    "linear_panel": i64,
    "layer_phases": i64,
    "sample_scratch": i64,
}


@dataclass(frozen=True, slots=True)
class Library:
    """The kernels that this machine can run. `isas` are instruction sets, best first; never empty."""

    handle: ctypes.CDLL
    digest: str
    compiler: str
    threaded: bool
    isas: tuple[str, ...]

    def kernel(self, name: str, isa: str) -> Callable[..., Any]:
        """The kernel compiled for that instruction set. The call releases the interpreter lock."""
        function = self.handle[f"{name}_{isa}"]
        function.argtypes = SIGNATURES[name]
        function.restype = RETURNS.get(name)
        return function

    def pick(self, isa: str | None) -> str:
        """`isa` if it runs here, or the best; ValueError otherwise."""
        if isa is None:
            return self.isas[0]
        if isa not in self.isas:
            raise ValueError(f"instruction set {isa} does not run here; there are {', '.join(self.isas)}")
        return isa

    def describe(self, isa: str) -> str:
        """What decides the bits of native results: for the fingerprint."""
        return f"native-{isa} kernels={self.digest} compiler={self.compiler}"


@cache
def load() -> Library | None:
    """The library; None where it can be neither found nor built, which is logged in one line."""
    try:
        library = open_library()
    except (build.BuildError, OSError) as error:
        log.warning("native kernels are not available, torch takes their place (slower): %s", error)
        return None
    if not library.threaded:
        log.warning("native kernels were built without OpenMP: they run on one thread (%s)", library.compiler)
    return library


def open_library(sources: Path = build.HERE) -> Library:
    """The library of these sources, built if need be. Raises BuildError or OSError."""
    handle = ctypes.CDLL(str(build.build(sources)))
    handle.jitney_compiler.restype = ctypes.c_char_p
    handle.jitney_supports.argtypes = (ctypes.c_char_p,)
    return Library(
        handle=handle,
        digest=build.digest(sources),
        compiler=handle.jitney_compiler().decode(),
        threaded=bool(handle.jitney_threaded()),
        isas=tuple(isa for isa in build.isa_flags() if _runs(handle, isa)),
    )


def _runs(handle: ctypes.CDLL, isa: str) -> bool:
    return bool(handle.jitney_supports(isa.encode())) and hasattr(handle, f"rms_norm_{isa}")


def threads_for(elements: int) -> int:
    """torch's number of threads if that many elements are worth waking them."""
    return torch.get_num_threads() if elements >= WORTH_THREADS else 1


WORTH_THREADS = 32768
