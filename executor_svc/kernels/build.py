"""Builds the C sources beside this file into one shared library; `python -m executor_svc.kernels.build` does it.

Every source in PER_ISA is compiled once for each instruction set that the compiler knows, under names that end in it
(`attend_avx2`); which one runs is chosen on the machine that loads the library. Its file name holds the digest of
sources and flags, so that a library is never used with other sources than its own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ONCE = ("cpu.c",)
PER_ISA = ("copy.c", "layers.c", "linear.c", "paged_attention.c", "pool.c", "rows.c", "sampling.c")
COMPILERS = ("cc", "gcc", "clang")
COMMON_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=default")
X86_FLAGS: dict[str, tuple[str, ...]] = {
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
        *("-mprefer-vector-width=512", "-DISA_AVX512"),
    ),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-DISA_AVX2"),
}
COMPILE_TIMEOUT_S = 300


class BuildError(Exception):
    """The library cannot be built here; the message is one line."""


def digest(sources: Path = HERE) -> str:
    """16 hex digits over sources and flags."""
    state = hashlib.sha256()
    for path in sorted([*sources.glob("*.c"), *sources.glob("*.h")]):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    state.update(repr((COMMON_FLAGS, sorted(X86_FLAGS.items()))).encode())
    return state.hexdigest()[:16]


def library_path(sources: Path = HERE) -> Path:
    """Where the library of these sources is, once it is built."""
    return sources / f"_kernels-{digest(sources)}.so"


def isa_flags() -> dict[str, tuple[str, ...]]:
    """Compiler flags of each instruction set of this kind of machine, best first."""
    x86 = X86_FLAGS if platform.machine().lower() in ("x86_64", "amd64") else {}
    return {**x86, "portable": ()}


def find_compiler() -> str | None:
    """The first C compiler on the path."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def build(sources: Path = HERE) -> Path:
    """Builds the library unless it is there already, removes older ones, returns its path. Raises BuildError."""
    target = library_path(sources)
    if target.exists():
        return target
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C compiler found (looked for {', '.join(COMPILERS)})")
    if not os.access(sources, os.W_OK):
        raise BuildError(f"{sources} is not writable")
    with tempfile.TemporaryDirectory(prefix="jitney-kernels-") as folder:
        threads = _threads_flag(compiler, Path(folder))
        objects = _compile_all(compiler, threads, sources, Path(folder))
        fresh = target.with_suffix(f".{os.getpid()}.tmp")
        _run(compiler, "-shared", *threads, "-o", str(fresh), *map(str, objects), "-lm")
        fresh.replace(target)
    for other in sources.glob("_kernels-*.so"):
        if other != target:
            other.unlink(missing_ok=True)
    return target


def _threads_flag(compiler: str, folder: Path) -> tuple[str, ...]:
    """-fopenmp where it links; a compiler without an OpenMP runtime builds kernels that run on one thread."""
    probe = folder / "probe.c"
    probe.write_text("#include <omp.h>\nint probe(void) { return omp_get_max_threads(); }\n")
    try:
        _run(compiler, "-fopenmp", "-shared", "-fPIC", "-o", str(folder / "probe.so"), str(probe))
    except BuildError:
        return ()
    return ("-fopenmp",)


def _compile_all(compiler: str, threads: Sequence[str], sources: Path, folder: Path) -> list[Path]:
    """One object a source and instruction set. A set that the compiler does not know is left out."""
    objects = [_compile(compiler, sources / name, folder / f"{name}.o", threads) for name in ONCE]
    for isa, flags in isa_flags().items():
        try:
            objects += [
                _compile(compiler, sources / name, folder / f"{name}.{isa}.o", (*threads, *flags, f"-DISA={isa}"))
                for name in PER_ISA
            ]
        except BuildError:
            if isa == "portable":
                raise
    return objects


def _compile(compiler: str, source: Path, target: Path, flags: Sequence[str]) -> Path:
    _run(compiler, *COMMON_FLAGS, *flags, "-c", str(source), "-o", str(target))
    return target


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise BuildError(f"{Path(command[0]).name} failed: {reason}")


def main() -> int:
    """Builds and says where the library is; status 0 too where there is no compiler, since torch takes over."""
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as error:
        sys.stderr.write(f"native kernels not built, torch takes their place: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
