"""Mistakes to make in the CUDA kernels, one at a time, and the checks that must see every one of them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from executor_svc.kernels.cuda import sources
from executor_svc.kernels.cuda.emulated_launcher import EmulatedFault, EmulatedLauncher
from executor_svc.kernels.cuda.paged import Splits
from tests.support import paged_cases as cases


@dataclass(frozen=True, slots=True)
class Mutant:
    """A patch of one source: `old`, which is there once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


RIGHT, WRONG = 0, 3
"""Exit statuses of a check; any other one but a signal says that the check itself is broken."""
PATIENCE_S = 120.0
_DECODE, _MERGE, _BLOCKS = "paged_decode.cuh", "merge.cuh", "blocks.cuh"

MUTANTS = (
    Mutant("no barrier before the fold", _DECODE, "    __syncthreads();\n", ""),
    Mutant("the block before", _DECODE, "next = table[block + 2 * WARPS]", "next = table[block + 2 * WARPS - 1]"),
    Mutant("another row's table", _DECODE, "place_of(table_rows, row) * table_stride", "row * table_stride"),
    Mutant("another token's query", _DECODE, "place_of(tokens, row) * q_stride", "row * q_stride"),
    Mutant(
        "scores the tail", _DECODE, "2 * t + i < tokens ? c[i] * scale : NEVER", "2 * t + i < 16 ? c[i] * scale : NEVER"
    ),
    Mutant("one token too many", _DECODE, "2 * t + i < tokens ?", "2 * t + i <= tokens ?"),
    Mutant("reads values of the tail", _DECODE, "values[i][h] = token < tokens ?", "values[i][h] = token < 16 ?"),
    Mutant("forgets the last, partial block", _DECODE, "    if (block < last) {", "    if (block < last - 1) {"),
    Mutant(
        "values are keys",
        _DECODE,
        "load_values(values, at + values_offset, token_stride, BLOCK_TOKENS)",
        "load_values(values, at, token_stride, BLOCK_TOKENS)",
    ),
    Mutant(
        "token stride of one head",
        _DECODE,
        "block + (token * token_stride + 8 * t)",
        "block + (token * HEAD_SIZE + 8 * t)",
    ),
    Mutant("32-bit offset", _DECODE, "at = pool + next * block_stride", "at = pool + (int)(next * block_stride)"),
    Mutant(
        "queries of another group", _DECODE, "* q_stride + head * group * HEAD_SIZE", "* q_stride + head * HEAD_SIZE"
    ),
    Mutant(
        "results to another group",
        _DECODE,
        "* out_stride + head * group * HEAD_SIZE + i",
        "* out_stride + head * HEAD_SIZE + i",
    ),
    Mutant("always as float", _DECODE, "+ i, out_float, sum, weight", "+ i, 1, sum, weight"),
    Mutant("keeps old sums as they are", _DECODE, "have->sums[j][2] *= before0;", ""),
    Mutant("keeps the old weight as it is", _DECODE, "have->weight *= before;", ""),
    Mutant("scales by the other query", _DECODE, "shuffle(before, 8 * t + 4)", "shuffle(before, 8 * t)"),
    Mutant("a peak of half the tokens", _DECODE, "peak = fmaxf(peak, shuffle_xor(peak, 2));", ""),
    Mutant("drops what rounding leaves", _DECODE, "mma(have->sums[j], a0, a1, a2, a3, rest0, rest1);", ""),
    Mutant("swaps two tokens' values", _DECODE, "a2 = low_halves(v[2], v[3])", "a2 = low_halves(v[3], v[2])"),
    Mutant(
        "leaves what is behind the last chunk", _DECODE, "split == splits - 1 ? blocks :", "split == splits ? blocks :"
    ),
    Mutant(
        "one warp counts twice",
        _DECODE,
        "weight += by * shared.weights[w][member]",
        "weight += by * shared.weights[w / 3][member]",
    ),
    Mutant("parts over another's", _DECODE, "* splits + split;", "* splits + split / 2;"),
    Mutant("leaves the last part", _MERGE, "min(splits, (blocks + each - 1) / each)", "min(splits, blocks / each)"),
    Mutant("merges parts that nobody wrote", _MERGE, "s < used; s++) {", "s < splits; s++) {"),
    Mutant("merges without scale", _MERGE, "sum += scale * parts", "sum += parts"),
    Mutant("weighs parts without scale", _MERGE, "weight += scale * sums", "weight += sums"),
    Mutant("an empty part counts", _MERGE, "part_peak == NEVER ? 0.0f : exp2_fast", "exp2_fast"),
    Mutant("no tokens, no number", _MERGE, "weight == 0.0f ? 0.0f : sum / weight", "sum / weight"),
    Mutant("results in the order of rows", _MERGE, "place_of(tokens, row) * out_stride", "row * out_stride"),
    Mutant(
        "writes to the next place",
        _BLOCKS,
        "slot % BLOCK_TOKENS * token_stride",
        "(slot + 1) % BLOCK_TOKENS * token_stride",
    ),
    Mutant("values into keys", _BLOCKS, "store16(to + values_offset + i,", "store16(to + i,"),
    Mutant("does not skip", _BLOCKS, "    if (slot < 0) return;\n", ""),
    Mutant("scatters in order", _BLOCKS, "(targets == nullptr ? block : targets[block])", "block"),
    Mutant("a piece too long", _BLOCKS, "if (at + i * step < bytes) store16", "if (at < bytes) store16"),
    Mutant("unaligned", _BLOCKS, "16 * threadIdx.x; at < bytes", "8 * threadIdx.x; at < bytes"),
)


def apply(mutant: Mutant | None, folder: Path) -> None:
    """Copies the sources into an empty folder, with the mistake. AssertionError where its place is not found once."""
    for path in (*sources.HERE.glob("*.cu"), *sources.HERE.glob("*.cuh")):
        shutil.copy(path, folder)
    shutil.copytree(sources.HERE / "emulation", folder / "emulation")
    if mutant is not None:
        text = (folder / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.name}: found {text.count(mutant.old)} times"
        (folder / mutant.file).write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def survives(folder: Path) -> bool:
    """Whether the conformance checks find nothing wrong with these sources. In a process of its own: a mistake may
    write anywhere, and ends it at best."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    checking = server.Process(target=_check, args=(folder,), daemon=True)
    checking.start()
    checking.join(PATIENCE_S)
    if checking.is_alive():  # it goes round and round
        checking.kill()
        checking.join()
    assert checking.exitcode is not None and (checking.exitcode < 0 or checking.exitcode in (RIGHT, WRONG))
    return checking.exitcode == RIGHT


def _check(folder: Path) -> None:
    """On small cases of one variant; the exit status is what came of it."""
    launcher = EmulatedLauncher(folder)
    case = cases.PagedCase(cases.EDGES, group=3, head_size=64, dtype=torch.float16)
    try:
        cases.check_decode(launcher, case, (Splits(1), Splits(3), Splits(4, 3)))
        cases.check_write(launcher)
        cases.check_moves(launcher)
        cases.check_far_blocks(launcher, 64, torch.float16)
    except (AssertionError, EmulatedFault):
        os._exit(WRONG)
    os._exit(RIGHT)
