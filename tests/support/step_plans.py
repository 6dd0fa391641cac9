"""Step plans made by hand: which tokens of which sequences one forward pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from executor_svc.step_plan import SamplingRows, StepPlan
from jitney.columns import I32, I64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence from position `start` on. `write` false: their KV is in the pool already."""

    sequence: int
    token_ids: Sequence[int]
    start: int = 0
    sample: bool = True
    write: bool = True


class Sequences:
    """Owns the blocks of a number of sequences in a pool: scattered, and disjoint."""

    def __init__(self, sequences: int, max_tokens: int, *, block_tokens: int = 16, seed: int = 0) -> None:
        self.block_tokens = block_tokens
        self.per_sequence = -(-max_tokens // block_tokens)
        self.blocks = sequences * self.per_sequence + 1
        order = np.random.default_rng(seed).permutation(self.blocks)[: sequences * self.per_sequence]
        self.table: I32 = order.astype(np.int32).reshape(sequences, self.per_sequence)

    def plan(self, chunks: Sequence[Chunk], sampling: SamplingRows | None = None, step: int = 0) -> StepPlan:
        """A step of these chunks, in this order; greedy without logprobs unless said otherwise."""
        lengths = [len(chunk.token_ids) for chunk in chunks]
        positions = [np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.int32) for chunk in chunks]
        slots = [
            self._slots(chunk.sequence, where) if chunk.write else np.full(len(where), -1, np.int64)
            for chunk, where in zip(chunks, positions, strict=True)
        ]
        sample_rows = np.array([row for row, chunk in enumerate(chunks) if chunk.sample], np.int32)
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        return StepPlan(
            step=step,
            token_ids=np.array(tokens, np.int32),
            positions=np.concatenate(positions) if chunks else np.empty(0, np.int32),
            write_slots=np.concatenate(slots) if chunks else np.empty(0, np.int64),
            query_start=np.cumsum([0, *lengths], dtype=np.int32),
            context_tokens=np.array([chunk.start + len(chunk.token_ids) for chunk in chunks], np.int32),
            block_table=self.table,
            table_rows=np.array([chunk.sequence for chunk in chunks], np.int32),
            sample_rows=sample_rows,
            sampling=sampling if sampling is not None else sampling_rows(len(sample_rows)),
        )

    def _slots(self, sequence: int, positions: I32) -> I64:
        slots: I64 = self.table[sequence, positions // self.block_tokens].astype(np.int64) * self.block_tokens
        slots += positions % self.block_tokens
        return slots


def sampling_rows(
    rows: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    logprobs: int = -1,
) -> SamplingRows:
    """The same settings for every row; position and choice 0."""
    return SamplingRows(
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        min_p=np.full(rows, min_p, np.float32),
        seed=np.full(rows, seed, np.uint64),
        choice=np.zeros(rows, np.int32),
        position=np.zeros(rows, np.int32),
        logprobs=np.full(rows, logprobs, np.int32),
    )
