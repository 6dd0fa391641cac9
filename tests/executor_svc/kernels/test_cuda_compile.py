"""Every CUDA kernel compiles for the GPUs that there are, and keeps what it works on in registers.

NVRTC is one of the packages that the tests need: where it is missing this fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_svc.kernels.cuda.compile import ARCHITECTURES, CompileError, compile_for
from executor_svc.kernels.cuda.variants import VARIANTS, Variant
from tests.support.cuda_mutants import apply

DECODE_REGISTERS = {64: 128, 128: 255}
"""Of a thread, at most: four thread blocks of 128 threads on a multiprocessor, and two."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_compiles_without_spills(variant: Variant, architecture: str) -> None:
    compiled = compile_for(variant, architecture)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert not [usage for usage in compiled.usage if usage.spill_bytes]
    registers = {usage.kernel: usage.registers for usage in compiled.usage}
    assert registers.pop("paged_decode") <= DECODE_REGISTERS[variant.head_size]
    assert max(registers.values()) <= 64


def test_a_spill_is_seen(tmp_path: Path) -> None:
    """The gate sees what it is there for."""
    apply(None, tmp_path)
    source = (tmp_path / "paged_decode.cuh").read_text()
    bounds = "HEAD_SIZE == 128 ? 2 : 4"
    assert source.count(bounds) == 1
    (tmp_path / "paged_decode.cuh").write_text(source.replace(bounds, "8"))
    usage = {one.kernel: one for one in compile_for(VARIANTS[-1], "sm_90a", tmp_path).usage}
    assert usage["paged_decode"].spill_bytes > 0
    assert usage["write_kv"].spill_bytes == 0


def test_what_does_not_compile_is_an_error(tmp_path: Path) -> None:
    """With the compiler's words."""
    apply(None, tmp_path)
    (tmp_path / "merge.cuh").write_text("nonsense")
    with pytest.raises(CompileError, match="nonsense"):
        compile_for(VARIANTS[0], "sm_90a", tmp_path)
