"""A ledger with what its tests say often: chains of real keys, numbered batches, an audit after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cache_svc.audit import audit
from cache_svc.blocks import BlockTable
from cache_svc.ledger import Ledger
from jitney.block_ops import (
    Acquire,
    Batch,
    BatchAnswer,
    Block,
    Chain,
    ChainHits,
    Release,
    RequestId,
    Reserve,
    ResultCode,
    Seal,
)
from jitney.columns import I32
from jitney.keys import Key, Root, chain, salt_digest

BLOCK_TOKENS = 4
OK = ResultCode.OK


@dataclass(frozen=True)
class Prompt:
    """Token ids of whole blocks, with their keys."""

    tokens: I32
    root: Key = field(default_factory=lambda: Root(model_version="model").key())

    @property
    def keys(self) -> list[Key]:
        """Of the full blocks."""
        return chain(self.root, self.tokens, BLOCK_TOKENS)

    def seal(self, request: int, blocks: Sequence[Block], first: int = 0, tenant: str = "default") -> Seal:
        """Seals `blocks`, the first of which is the block `first` of the prompt."""
        last = first + len(blocks)
        return Seal(
            request=RequestId(request),
            blocks=blocks,
            keys=self.keys[first:last],
            parent=self.keys[first - 1] if first else self.root,
            token_ids=self.tokens[first * BLOCK_TOKENS : last * BLOCK_TOKENS].astype("<i4").tobytes(),
            tenant=tenant,
            salt_digest=salt_digest(""),
            model_version="model",
        )


def prompt(*path: int, salt: str = "") -> Prompt:
    """A prompt with one block a number: equal beginnings share their blocks."""
    tokens = np.repeat(np.array(path, np.int32), BLOCK_TOKENS) * 10 + np.tile(
        np.arange(BLOCK_TOKENS, dtype=np.int32), len(path)
    )
    return Prompt(tokens, Root(salt, "model").key())


class Rig:
    """A ledger and its batches."""

    def __init__(self, blocks: int) -> None:
        self.ledger = Ledger(BlockTable(blocks), BLOCK_TOKENS)
        self.op_seq = 0

    def apply(self, **operations: Any) -> BatchAnswer:
        """One batch of these operations."""
        self.op_seq += 1
        answer = self.ledger.apply(replace(Batch(self.op_seq), **operations))
        self.check()
        return answer

    def check(self) -> None:
        """The audit finds nothing."""
        assert audit(self.ledger) == []

    def board(self, request: int, wanted: Prompt, extra: int = 0) -> BatchAnswer:
        """Acquire and Reserve of the prompt and `extra` blocks without a key."""
        return self.apply(**boarding((request, wanted, extra)))

    def cache(self, request: int, wanted: Prompt) -> list[Block]:
        """Has the request compute the prompt; it holds the blocks then."""
        answer = self.board(request, wanted)
        hits = answer.acquires[0].blocks
        new = answer.reserves[0].blocks
        codes = self.apply(seals=[wanted.seal(request, new, len(hits))]).seals
        assert codes == [[OK] * len(new)]
        return [*hits, *new]

    def release(self, *requests: int) -> BatchAnswer:
        """They let go of all."""
        return self.apply(releases=[Release(RequestId(request)) for request in requests])

    def hits(self, wanted: Prompt, request: int = 999) -> ChainHits:
        """What a look-up finds."""
        return self.ledger.lookup(Chain(RequestId(request), wanted.keys))


def boarding(*wanted: tuple[int, Prompt, int]) -> dict[str, Any]:
    """Acquires and Reserves of (request, prompt, extra blocks)."""
    return {
        "acquires": [Acquire(RequestId(request), each.keys) for request, each, _ in wanted],
        "reserves": [Reserve(RequestId(request), each.keys, len(each.keys) + extra) for request, each, extra in wanted],
    }
