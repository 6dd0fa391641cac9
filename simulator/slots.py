"""Modelled bytes: a block's content is one number a token, and what nobody has written there is POISON.

A copy takes time, and what happens to its source or target meanwhile must not go unseen: the first half of a block is
copied when the copy begins and the second when it ends. A source that was not written yet, or is written again too
early, thus gives content that nobody ever wrote, and tokens that differ from those of the request alone.
"""

from __future__ import annotations

import numpy as np
import xxhash

from jitney.columns import U32, U64
from jitney.ticket_ops import Slot, slot_generation, slot_id

POISON = np.uint64(0xDEAD)


class Slots:
    """The CPU tier's slots, with the generation that each has."""

    def __init__(self, slots: int, block_tokens: int) -> None:
        self.content: U64 = np.full((slots, block_tokens), POISON, np.uint64)
        self.generations: U32 = np.zeros(slots, np.uint32)

    def block(self, slot: Slot) -> U64:
        """Content [tokens of a block] of a slot, to be read or written."""
        content: U64 = self.content[slot_id(slot)]
        return content

    def current(self, slot: Slot) -> bool:
        """Whether the slot is still what the handle says."""
        return int(self.generations[slot_id(slot)]) == slot_generation(slot)


class Transfer:
    """One block on its way."""

    def __init__(self, source: U64, target: U64) -> None:
        """Begins: half of it is there."""
        self._source, self._target = source, target
        self._half = len(source) // 2
        target[:] = POISON
        target[: self._half] = source[: self._half]

    def end(self) -> int:
        """The rest is there; the checksum of what has arrived."""
        self._target[self._half :] = self._source[self._half :]
        return checksum(self._target)


def checksum(content: U64) -> int:
    """xxh3_64 of a block's content."""
    return xxhash.xxh3_64_intdigest(content.tobytes())
