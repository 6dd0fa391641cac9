"""One load of a boarded request: device blocks that are filled from the CPU tier instead of being computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jitney.block_ops import Block
from jitney.ticket_ops import LoadReady, Ticket

PATIENCE_US = 3_000_000
"""So long the next block is waited for: a disk may hang."""


@dataclass(slots=True)
class Load:
    """`blocks` are its targets, in the order of the chain. `end` falls when the rest will not come.

    The steps up to `after_step` may still use the targets for whoever had them before.
    """

    ticket: Ticket
    blocks: Sequence[Block]
    cpu_blocks: int
    after_step: int
    end: int
    offered: int = 0  # blocks that the cache has offered
    parts: list[LoadReady] = field(default_factory=list)  # offered, and not being copied
    copying: int = 0  # parts on their way
    good: int = 0  # leading blocks that were copied and verified
    bad: bool = False
    cancelled: bool = False
    void: bool = False  # the cache that offered it is gone
    seen: int = -1  # of `offered`
    since_us: int = 0  # when it last came any further

    @property
    def over(self) -> bool:
        """Whether nothing of it is to be copied any more."""
        if self.copying or self.parts:
            return False
        return self.cancelled or self.void or self.bad or self.offered >= self.end

    def lost(self, first: int) -> None:
        """What stands from index `first` on will not come."""
        self.end = min(self.end, max(first, self.offered))

    def wait(self, now_us: int) -> None:
        """What has not come for long is not waited for: it is computed."""
        if self.copying or self.parts or self.seen != self.offered:
            self.seen, self.since_us = self.offered, now_us
        elif now_us - self.since_us >= PATIENCE_US:
            self.end = self.offered

    def offer(self, part: LoadReady) -> None:
        """Slots can be read. What comes twice, or for a load that has ended, is nothing new; after a stream broke, the
        cache offers from the first block on, and more than was known."""
        known = self.offered - part.first
        if 0 <= known < len(part.slots) and not (self.cancelled or self.void or self.bad):
            new = replace(part, first=self.offered, slots=part.slots[known:], checksums=part.checksums[known:])
            self.offered += len(new.slots)
            self.parts.append(new)

    def copied(self, blocks: int, good: int) -> None:
        """A part has been copied: of its `blocks`, the first `good` are right."""
        self.copying -= 1
        self.good += 0 if self.bad else good
        self.bad |= good < blocks

    def stop(self) -> None:
        """Nothing more is begun."""
        self.parts.clear()
