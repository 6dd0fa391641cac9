"""Reads machine code of NVIDIA GPUs, as nvdisasm prints it: the inner loop of a kernel and what it loads."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

LANES = 32
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True, slots=True)
class Loop:
    """An inner loop: its instructions, how many of them load from global memory, and the bytes a lane loads."""

    instructions: int
    loads: int
    lane_bytes: int

    @property
    def bytes_per_load(self) -> float:
        """Of a lane."""
        return self.lane_bytes / self.loads if self.loads else 0.0

    @property
    def bytes_per_instruction(self) -> float:
        """Of a warp, over all instructions of the loop."""
        return LANES * self.lane_bytes / self.instructions


def find_nvdisasm() -> str | None:
    """NVIDIA's disassembler: of the package nvidia-cuda-nvdisasm, or on the path."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    found = [str(place / "cu13" / "bin" / "nvdisasm") for place in places if (place / "cu13/bin/nvdisasm").exists()]
    return found[0] if found else shutil.which("nvdisasm")


def disassemble(cubin: bytes, nvdisasm: str) -> dict[str, list[str]]:
    """The lines of each kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run((nvdisasm, "-c", file.name), capture_output=True, text=True, check=True).stdout
    kernels: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(".text.") and line.endswith(":"):
            lines = kernels.setdefault(line[6:-1], [])
        else:
            lines.append(line)
    return kernels


def inner_loop(lines: list[str]) -> Loop | None:
    """Of the loops that hold no other loop the one that loads most bytes; None where none loads anything."""
    names: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := _INSTRUCTION.match(line):
            names.append((instruction[1], instruction[2]))
    loops = []
    for end, (name, rest) in enumerate(names):
        target = _TARGET.search(rest)
        if name.startswith("BRA") and target and labels.get(target[1], end) < end:
            loops.append((labels[target[1]], end))
    inner = [loop for loop in loops if not any(loop[0] <= other[0] and other[1] < loop[1] for other in loops)]
    found = [_count([name for name, _ in names[start : end + 1]]) for start, end in inner]
    loading = [loop for loop in found if loop.loads]
    return max(loading, key=lambda loop: loop.lane_bytes) if loading else None


def _count(names: list[str]) -> Loop:
    loads = [name.split(".") for name in names if name.split(".")[0] == "LDG"]
    widths = [next((_WIDTHS[part] for part in load if part in _WIDTHS), 4) for load in loads]
    return Loop(sum(name != "NOP" for name in names), len(loads), sum(widths))
