"""A learned model as integers: boosted trees of one depth, whose leaves are added up; p50 and p90.

    content = b"JTL1", u8 depth D, u8 trees T, then for p50 and for p90:
              i32 start, [T, 2^D - 1] u8 input, [T, 2^D - 1] i32 threshold, [T, 2^D] i32 leaf     (little-endian)

A node sends a row to its right child if the input is above the threshold; leaves and start are FINE parts of a step of
the scale. The table is made by `train_lengths`, and read once: what is read depends on its bytes alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from jitney.columns import I64, U64
from jitney.errors import InvalidRequest
from jitney.features import Feature, unpack
from scheduler_svc.lengths.signals import FINE

MAGIC: Final = b"JTL1"
INPUTS: Final = len(Feature) + 2
"""The counted signals, then the logarithms of the prompt's tokens and of the length that history says (-1: none)."""
MAX_DEPTH: Final = 6
MAX_TREES: Final = 200
_HEAD: Final = struct.Struct("<4sBB")


@dataclass(frozen=True, slots=True)
class Trees:
    """One quantile. `inputs` and `thresholds` [T * (2^D - 1)], `leaves` [T * 2^D]."""

    depth: int
    start: int
    inputs: I64
    thresholds: I64
    leaves: I64

    def predict(self, x: I64) -> I64:
        """Logarithms of lengths [N] for inputs [N, INPUTS]."""
        inner = (1 << self.depth) - 1
        trees = np.arange(len(self.leaves) >> self.depth)
        rows, node = np.arange(len(x))[:, None], np.zeros((len(x), len(trees)), np.int64)
        for _ in range(self.depth):
            at = node + trees * inner
            node = 2 * node + 1 + (x[rows, self.inputs[at]] > self.thresholds[at])
        total = self.leaves[node - inner + (trees << self.depth)].sum(axis=1) + self.start
        logs: I64 = np.maximum(total // FINE, 0)
        return logs


@dataclass(frozen=True, slots=True)
class LengthTable:
    """The learned model."""

    p50: Trees
    p90: Trees


@lru_cache(maxsize=8)
def read_table(content: bytes) -> LengthTable:
    """The model of a table's content. InvalidRequest for bytes that are none."""
    if len(content) < _HEAD.size:
        raise _wrong("at least 6 bytes", f"{len(content)} bytes")
    magic, depth, trees = _HEAD.unpack_from(content)
    if magic != MAGIC:
        raise _wrong(f"content that begins with {MAGIC!r}", repr(magic))
    if not 1 <= depth <= MAX_DEPTH or not 1 <= trees <= MAX_TREES:
        raise _wrong(f"depth 1 to {MAX_DEPTH}, 1 to {MAX_TREES} trees", f"depth {depth}, {trees} trees")
    inner, outer = trees * ((1 << depth) - 1), trees << depth
    size = 4 + 5 * inner + 4 * outer
    if len(content) != _HEAD.size + 2 * size:
        raise _wrong(f"{_HEAD.size + 2 * size} bytes for depth {depth} and {trees} trees", f"{len(content)} bytes")
    found = []
    for at in (_HEAD.size, _HEAD.size + size):
        inputs = np.frombuffer(content, np.uint8, inner, at + 4).astype(np.int64)
        if int(inputs.max()) >= INPUTS:
            raise _wrong(f"inputs below {INPUTS}", str(int(inputs.max())))
        found.append(
            Trees(
                depth,
                struct.unpack_from("<i", content, at)[0],
                inputs,
                np.frombuffer(content, "<i4", inner, at + 4 + inner).astype(np.int64),
                np.frombuffer(content, "<i4", outer, at + 4 + 5 * inner).astype(np.int64),
            )
        )
    return LengthTable(*found)


def write_table(table: LengthTable) -> bytes:
    """The content of a table."""
    depth = table.p50.depth
    parts = [_HEAD.pack(MAGIC, depth, len(table.p50.leaves) >> depth)]
    for trees in (table.p50, table.p90):
        parts += [struct.pack("<i", trees.start), trees.inputs.astype(np.uint8).tobytes()]
        parts += [trees.thresholds.astype("<i4").tobytes(), trees.leaves.astype("<i4").tobytes()]
    return b"".join(parts)


def inputs_of(features: U64, prompt_logs: I64, history_logs: I64) -> I64:
    """What the model sees of requests, [N, INPUTS]."""
    return np.column_stack((unpack(features), prompt_logs, history_logs))


def _wrong(limit: str, value: str) -> InvalidRequest:
    return InvalidRequest(
        f"the table of lengths must have {limit}, has {value}", field="policy.tables.lengths", limit=limit, value=value
    )
