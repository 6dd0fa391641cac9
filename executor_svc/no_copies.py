"""CopyPort of an executor whose cache has no tier below the device: nothing is ever ordered."""

from __future__ import annotations

from collections.abc import Sequence

from executor_svc.ports import CopyRates, LoadCopied, Moved, StoreCopied
from jitney.block_ops import Block, Segment
from jitney.ticket_ops import Slot


class NoCopies:
    """Refuses segments, and has no jobs."""

    def attach(self, segments: Sequence[Segment]) -> None:
        """ValueError if there is a tier after all."""
        if segments:
            raise ValueError("the cache has a CPU tier, and nothing here copies to it")

    def store(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], *, urgent: bool) -> None:
        """ValueError."""
        raise ValueError(f"job {job}: there is no CPU tier to store {len(blocks)} blocks in")

    def hurry(self, job: int) -> None:
        """ValueError."""
        raise ValueError(f"job {job}: there are no stores")

    def load(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], checksums: Sequence[int]) -> None:
        """ValueError."""
        raise ValueError(f"job {job}: there is no CPU tier to load {len(blocks)} blocks from")

    def poll(self) -> StoreCopied | LoadCopied | None:
        """None."""
        return None

    def rates(self) -> CopyRates:
        """Unknown."""
        return CopyRates()

    def moved(self) -> Moved:
        """Nothing."""
        return Moved()
