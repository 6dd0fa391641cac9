"""The batches of `bench.ledger`: 256 rows as an executor tells the cache of them, step after step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.ledger_workload import (
    ADMITTED_A_STEP,
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    ROWS,
    prompt,
)
from jitney.block_ops import (
    Acquire,
    Batch,
    BatchAnswer,
    Bind,
    Block,
    Chain,
    Release,
    RequestId,
    Reserve,
    ResultCode,
    Seal,
)
from jitney.columns import I32
from jitney.keys import Key, Root, chain, salt_digest

ROOT = Root("", "bench").key()
GRANT = ROWS // BLOCK_TOKENS
Apply = Callable[[Batch], tuple[BatchAnswer, int]]
"""Runs a batch; its answer, and the nanoseconds that it took."""


@dataclass(slots=True)
class Row:
    """A request: its tokens up to its end, the keys of all their blocks and of its prompt's, its blocks so far, and how
    many of them are sealed."""

    id: RequestId
    tokens: I32
    keys: list[Key]
    prompt_keys: list[Key]
    length: int = PROMPT_TOKENS
    blocks: list[Block] = field(default_factory=list)
    sealed: int = 0

    def seal(self, blocks: int) -> Seal:
        """Of its next so many blocks."""
        first, last = self.sealed, self.sealed + blocks
        self.sealed = last
        return Seal(
            request=self.id,
            blocks=self.blocks[first:last],
            keys=self.keys[first:last],
            parent=self.keys[first - 1] if first else ROOT,
            token_ids=self.tokens[first * BLOCK_TOKENS : last * BLOCK_TOKENS].tobytes(),
            tenant="default",
            salt_digest=salt_digest(""),
            model_version="bench",
        )


class Rows:
    """All rows. What is not the batch itself (prompts, keys, its making) lies outside the time taken."""

    def __init__(self, common_blocks: int, apply: Apply) -> None:
        self._common_blocks = common_blocks
        self._apply = apply
        self._rows: deque[Row] = deque()
        self._admitted: Sequence[Row] = ()
        self._granted: list[Block] = []
        self._steps = 0
        self._count = 0
        self.hit_blocks = 0

    def step(self) -> int:
        """One step; nanoseconds of its batch."""
        self._steps += 1
        computed = [row.seal(blocks) for row in self._admitted if (blocks := PROMPT_BLOCKS - row.sealed)]
        full = [row for row in self._rows if row.length // BLOCK_TOKENS > row.sealed]
        ended = [self._rows.popleft() for _ in range(ADMITTED_A_STEP if len(self._rows) == ROWS else 0)]
        begun = [row for row in self._rows if row.length == len(row.blocks) * BLOCK_TOKENS]
        admitted = [self._row() for _ in range(ADMITTED_A_STEP)]
        batch = Batch(
            op_seq=self._steps,
            step=self._steps,
            in_flight_step=self._steps,
            seals=[*computed, *(row.seal(1) for row in full)],
            releases=[Release(row.id) for row in ended],
            binds=[self._bind(row) for row in begun],
            acquires=[Acquire(row.id, row.prompt_keys) for row in admitted],
            reserves=[Reserve(row.id, row.prompt_keys, PROMPT_BLOCKS + 1) for row in admitted],
            grant=GRANT - len(self._granted),
        )
        answer, took_ns = self._apply(batch)
        self._take(answer, admitted)
        for row in self._rows:
            row.length += 1
        self._rows += admitted
        self._admitted = admitted
        return took_ns

    def newest(self) -> tuple[I32, Chain]:
        """Prompt and chain of the row that came last."""
        row = self._rows[-1]
        return row.tokens[:PROMPT_TOKENS], Chain(row.id, row.prompt_keys)

    def _take(self, answer: BatchAnswer, admitted: Sequence[Row]) -> None:
        """Raises RuntimeError if the answer is not all well: the bench would measure something else."""
        codes = [code for each in (*answer.seals, *answer.releases, *answer.binds) for code in each]
        codes += [acquired.code for acquired in answer.acquires] + [reserved.code for reserved in answer.reserves]
        if wrong := set(codes) - {ResultCode.OK}:
            raise RuntimeError(f"the ledger answered {sorted(wrong)}")
        for row, acquired, reserved in zip(admitted, answer.acquires, answer.reserves, strict=True):
            row.blocks = [*acquired.blocks, *reserved.blocks]
            row.sealed = self.hit_blocks = len(acquired.blocks)
            if len(row.blocks) != PROMPT_BLOCKS + 1:
                raise RuntimeError(f"an admission got {len(row.blocks)} blocks")
        self._granted += answer.granted

    def _bind(self, row: Row) -> Bind:
        block = self._granted.pop()
        row.blocks.append(block)
        return Bind(row.id, (block,))

    def _row(self) -> Row:
        self._count += 1
        number = self._count
        ids = prompt(number, self._common_blocks)
        tokens = np.concatenate((ids, np.full(ANSWER_TOKENS, number, np.int32))).astype("<i4")
        keys = chain(ROOT, tokens, BLOCK_TOKENS)
        return Row(RequestId(number), tokens, keys, keys[:PROMPT_BLOCKS])
