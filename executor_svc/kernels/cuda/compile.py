"""Compiles the kernels for GPUs that are not here, with NVRTC, and reads what became of them.

`python -m executor_svc.kernels.cuda.compile` prints registers and spills of every kernel, variant and architecture.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from executor_svc.kernels.cuda import sources
from executor_svc.kernels.cuda.cupy_launcher import OPTIONS
from executor_svc.kernels.cuda.variants import VARIANTS, Variant

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
_ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '\w+'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers[^\n]*",
    re.DOTALL,
)
_SHARED = re.compile(r"(\d+) bytes smem")


class CompileError(Exception):
    """NVRTC is not here, or refused the source; the message says which."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one compiled kernel takes of a thread (registers, bytes spilled to memory) and of a thread block."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """The machine code of all kernels of a variant, and what they take."""

    cubin: bytes
    usage: tuple[Usage, ...]


def compile_for(variant: Variant, architecture: str, folder: Path = sources.HERE) -> Compiled:
    """Compiles as CuPyLauncher does. Raises CompileError."""
    nvrtc = library()
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), _source(folder), b"kernels.cu", 0, None, None))
    try:
        options = (*OPTIONS, *variant.defines, f"-arch={architecture}", "--ptxas-options=-v")
        packed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), packed)
        log = _read(nvrtc, program, "ProgramLog").decode(errors="replace")
        if status != 0:
            raise CompileError(f"{variant} for {architecture}: {log.strip()[:2000]}")
        return Compiled(_read(nvrtc, program, "CUBIN"), _usage(log))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def library() -> ctypes.CDLL:
    """NVRTC: the package nvidia-cuda-nvrtc, which PyTorch for CUDA brings too, or the system's. CompileError: none."""
    for folder in _folders():
        for path in sorted(folder.glob("libnvrtc.so.*"), reverse=True):
            for builtins in folder.glob("libnvrtc-builtins.so.*"):  # NVRTC looks for it by its name only
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL("libnvrtc.so")
    except OSError as error:
        raise CompileError("NVRTC is not here: pip install nvidia-cuda-nvrtc") from error


def _folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return [folder for root in roots for folder in (root / "cu13" / "lib", root / "cuda_nvrtc" / "lib")]


@cache
def _source(folder: Path) -> bytes:
    return sources.text(folder).encode()


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    room = ctypes.create_string_buffer(size.value)
    _check(nvrtc, nvrtc[f"nvrtcGet{what}"](program, room))
    return room.raw


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}")


def _usage(log: str) -> tuple[Usage, ...]:
    """What the assembler says of each kernel. CompileError if it does not speak of all of them."""
    found = {}
    for entry in _ENTRY.finditer(log):
        shared = _SHARED.search(entry[0])
        spilled = int(entry["stores"]) + int(entry["loads"])
        found[entry["kernel"]] = Usage(
            entry["kernel"], int(entry["registers"]), spilled, int(shared[1]) if shared else 0
        )
    if set(found) != set(sources.KERNELS):
        raise CompileError(f"the assembler reports on {sorted(found)}, not on {sorted(sources.KERNELS)}")
    return tuple(found[name] for name in sources.KERNELS)


def main() -> int:
    """Prints one line a kernel; status 1 where one does not compile or spills."""
    bad = False
    for architecture in ARCHITECTURES:
        for variant in VARIANTS:
            for usage in compile_for(variant, architecture).usage:
                bad |= usage.spill_bytes > 0
                sys.stdout.write(
                    f"{architecture:7} {variant!s:13} {usage.kernel:13} {usage.registers:4} registers "
                    f"{usage.spill_bytes:4} bytes spilled {usage.shared_bytes:6} bytes of shared memory\n"
                )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
