"""Finds the row multiple at start: how many rows a product must be padded to so that no row feels the others.

Kernels treat the rows of a matrix in groups and the rest of them with other code, whose sums run in another order.
For each shape of layer the probe computes products of many row counts and compares every row, bit by bit, with the
row computed among 48. The smallest m such that all counts that are multiples of m agree is the layer's multiple.
Counts up to 64 are tried one by one as far as the budget of arithmetic allows, then sizes of whole prefills.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path

import torch

from executor_svc.model.atomic_file import write_atomically
from executor_svc.model.linear import Linear, pad_rows

CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
GROUP = 48  # a multiple of every candidate
BUDGET_FLOP = 1.0e11  # of all shapes together: about a second on two cores
PROBE_VERSION = 1
_SEED = 20250107


@dataclass(frozen=True, slots=True)
class RowMultiple:
    """`invariant` is false if no candidate held; rows are then not padded at all."""

    multiple: int
    invariant: bool


def probe_cached(layers: Sequence[tuple[Linear, int]], machine: str, cache_dir: Path | None) -> RowMultiple:
    """`probe_layers`, remembered under `cache_dir` by shapes, `machine` (whatever decides bits) and threads."""
    shapes = [(layer.inputs, layer.outputs, rows) for layer, rows in layers]
    key = f"{PROBE_VERSION} {machine} {torch.get_num_threads()} {shapes}"
    if cache_dir is None:
        return probe_layers(layers)
    path = cache_dir / "probes" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        entry = json.loads(path.read_bytes())
        if entry["key"] == key and entry["multiple"] in range(1, lcm(*CANDIDATES) + 1):
            return RowMultiple(int(entry["multiple"]), bool(entry["invariant"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = probe_layers(layers)
    content = json.dumps({"key": key, "multiple": found.multiple, "invariant": found.invariant}).encode()
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return found


def probe_layers(layers: Sequence[tuple[Linear, int]]) -> RowMultiple:
    """The multiple that holds for all; one layer a shape, each with the most rows that it will see."""
    multiples = []
    for layer, rows in layers:
        multiple = _probe(layer, rows, BUDGET_FLOP / len(layers))
        if multiple is None:
            return RowMultiple(1, invariant=False)
        multiples.append(multiple)
    return RowMultiple(lcm(*multiples), invariant=True)


def _probe(layer: Linear, most_rows: int, budget_flop: float) -> int | None:
    most = max(GROUP, pad_rows(most_rows, GROUP))
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(most, layer.inputs, generator=generator)
    expected = torch.empty(most, layer.outputs)
    for start in range(0, most, GROUP):
        expected[start : start + GROUP] = layer(x[start : start + GROUP])
    left = budget_flop / (2.0 * layer.inputs * layer.outputs) - most
    possible = list(CANDIDATES)
    for rows in _row_counts(most_rows):
        wanted = [multiple for multiple in possible if rows % multiple == 0]
        left -= rows if wanted else 0
        if not wanted or (left < 0 and rows > GROUP):
            continue
        start = min(GROUP // 2 + 1, most - rows)  # other rows at other places than in `expected`
        if not torch.equal(layer(x[start : start + rows]), expected[start : start + rows]):
            possible = [multiple for multiple in possible if rows % multiple]
    return possible[0] if possible else None


def _row_counts(most_rows: int) -> list[int]:
    """Counts in the order of their worth: small ones, the largest one, then some between, odd ones among them."""
    large = []
    for size in (most_rows, most_rows // 4, most_rows // 2, 3 * most_rows // 4, 128, 96):
        large += [size, size - 1, *(size - size % multiple - multiple for multiple in (12, 8, 6, 4, 48))]
    counts = [*range(1, GROUP + 1), *large, *range(GROUP + 1, 65)]
    return [rows for rows in dict.fromkeys(counts) if 0 < rows <= max(most_rows, GROUP)]
