"""What the CUDA kernels take of a GPU, read off their machine code, and whether their tests see mistakes.

    python -m bench.kernels [--architecture sm_90a ...] [--no-mutants]

Nothing here needs a GPU. `bytes a load` is what one lane asks for at once (16 is the most there is); `bytes an
instruction` is what a warp loads in the inner loop over all its instructions: with 4 warps issued a cycle on each
multiprocessor it bounds the rate at which the kernel can read, if nothing waits. What was measured on a GPU comes from
the last run of bench.gpu_check, if there is one. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.sass import Loop, disassemble, find_nvdisasm, inner_loop
from executor_svc.kernels.cuda.compile import ARCHITECTURES, compile_for
from executor_svc.kernels.cuda.variants import VARIANTS
from tests.support.cuda_mutants import MUTANTS, apply, survives

GPU_CHECK = Path("bench/results/gpu_check.json")
SPLIT_BY_SHAPE = ("merge_splits", "paged_decode")
"""The other kernels do not depend on the variant."""


def kernel_rows(architecture: str) -> list[dict[str, Any]]:
    """One row a kernel and variant."""
    nvdisasm = find_nvdisasm()
    rows = []
    for variant in VARIANTS:
        compiled = compile_for(variant, architecture)
        code = disassemble(compiled.cubin, nvdisasm) if nvdisasm else {}
        for usage in compiled.usage:
            if usage.kernel not in SPLIT_BY_SHAPE and variant != VARIANTS[0]:
                continue
            loop = inner_loop(code.get(usage.kernel, []))
            rows.append(
                {
                    "name": usage.kernel,
                    "shape": str(variant) if usage.kernel in SPLIT_BY_SHAPE else "any",
                    "architecture": architecture,
                    "registers": usage.registers,
                    "spills": usage.spill_bytes,
                    "shared_bytes": usage.shared_bytes,
                    **_loop(loop),
                }
            )
    return rows


def _loop(loop: Loop | None) -> dict[str, Any]:
    if loop is None:
        return {"loop_instructions": None, "bytes_per_load": None, "bytes_per_instruction": None}
    return {
        "loop_instructions": loop.instructions,
        "bytes_per_load": round(loop.bytes_per_load, 1),
        "bytes_per_instruction": round(loop.bytes_per_instruction, 1),
    }


def measured(report: Path) -> dict[str, Any] | None:
    """What the last check found on a GPU; None where there was no check, or it ran on the emulation."""
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return found if found.get("device") else None


def killed_mutants() -> list[str]:
    """Names of the mutants that the conformance checks see. RuntimeError if the kernels themselves do not pass."""
    killed = []
    for mutant in (None, *MUTANTS):
        with tempfile.TemporaryDirectory(prefix="jitney-mutant-") as folder:
            apply(mutant, Path(folder))
            passed = survives(Path(folder))
        if mutant is None and not passed:
            raise RuntimeError("the kernels do not pass their own checks")
        if mutant is not None and not passed:
            killed.append(mutant.name)
    return killed


def main() -> int:
    """Prints a table, then one line of JSON; status 1 where something spills or a mutant lives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--architecture", nargs="*", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--no-mutants", action="store_true", help="only the machine code")
    arguments = parser.parse_args()
    rows = [row for architecture in arguments.architecture for row in kernel_rows(architecture)]
    line = (
        "{architecture:7} {name:13} {shape:13} {registers:9} {spills:6} {loop_instructions!s:>17} "
        "{bytes_per_load!s:>12} {bytes_per_instruction!s:>20}\n"
    )
    sys.stdout.write(f"{'':7} {'':13} {'':13} registers spills loop instructions bytes a load bytes an instruction\n")
    for row in rows:
        sys.stdout.write(line.format(**row))
    mutants = [] if arguments.no_mutants else [mutant.name for mutant in MUTANTS]
    killed = killed_mutants() if mutants else []
    for name in mutants:
        if name not in killed:
            sys.stdout.write(f"not seen: {name}\n")
    last_line = {
        "kernels": rows,
        "mutants_killed": len(killed),
        "mutants": len(mutants),
        "device": measured(GPU_CHECK),
    }
    sys.stdout.write(json.dumps(last_line) + "\n")
    return int(any(row["spills"] for row in rows) or len(killed) < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
