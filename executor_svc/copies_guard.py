"""What finds a block that is used while it is being copied: the emulation's own, a real GPU would say nothing.

A step reads and writes blocks, a copy from the device reads some, a copy to it writes some. Two that touch one block
at a time, one of them writing, are a fault in the order of the executor, and raised as such.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np

from executor_svc.step_plan import StepPlan


class BlockInFlight(Exception):
    """A block is used by two at a time; the message says by what."""


class InUse:
    """Blocks that are being read and written, of one pool. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: Counter[int] = Counter()
        self._written: Counter[int] = Counter()

    def begin(self, what: str, read: Collection[int], written: Collection[int]) -> None:
        """Raises BlockInFlight if that may not be."""
        with self._lock:
            clash = [block for block in written if self._read[block] or self._written[block]]
            clash += [block for block in read if self._written[block]]
            if clash:
                raise BlockInFlight(f"{what} uses blocks that are in use: {sorted(set(clash))[:8]}")
            self._read.update(read)
            self._written.update(written)

    def end(self, read: Collection[int], written: Collection[int]) -> None:
        """What began with these has ended."""
        with self._lock:
            self._read.subtract(read)
            self._written.subtract(written)

    @contextmanager
    def step(self, plan: StepPlan, block_tokens: int) -> Iterator[None]:
        """While a step runs."""
        used = -(-plan.context_tokens // block_tokens)
        tables = plan.block_table[plan.table_rows, : int(used.max(initial=0))]
        seen = set(np.unique(tables[np.arange(tables.shape[1]) < used[:, None]]).tolist())
        written = set(np.unique(plan.write_slots[plan.write_slots >= 0] // block_tokens).tolist())
        written |= set(plan.copies[:, 1].tolist())
        read = (seen | set(plan.copies[:, 0].tolist())) - written
        self.begin(f"step {plan.step}", read, written)
        try:
            yield
        finally:
            self.end(read, written)
