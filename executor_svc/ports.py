"""What the loop stands on: clock, scheduler, cache and model, each behind one small interface.

All are polled from the loop's thread and never block it; whatever arrives rings the clock's bell, so that
`Clock.wait` returns. The real ones live in clock.py, scheduler_client.py, cache_client.py and model_runner.py; the
simulator has virtual ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from executor_svc.live_request import LiveRequest
from executor_svc.step_plan import StepPlan, StepResult
from jitney.block_ops import Batch, BatchAnswer, Block, Chain, ChainHits, Counts, DeclaredBlock, LowerTiers, Segment
from jitney.decision import Decision
from jitney.snapshot import Rates, Snapshot
from jitney.ticket_ops import Slot, TicketCall, TicketEvent


class Clock(Protocol):
    """The executor's monotonic clock."""

    def now_us(self) -> int:
        """Microseconds since any fixed point; never goes back."""

    def wait(self, until_us: int | None) -> None:
        """Returns when the bell was rung since the last wait, or at `until_us` (None: only the bell)."""

    def ring(self) -> None:
        """Ends the current or the next wait; from any thread."""


class SchedulerPort(Protocol):
    """At most one snapshot is outstanding; a newer `ask` replaces it."""

    @property
    def connected(self) -> bool:
        """Whether a replica answers."""

    def ask(self, snapshot: Snapshot) -> None:
        """Sends; returns at once. Sets `attempt` itself when it asks again on another replica."""

    def poll(self) -> Decision | None:
        """The decision for the last snapshot, once, when it is there."""


class CacheState(Protocol):
    """What the loop can tell a cache that has lost its memory."""

    @property
    def storing(self) -> bool:
        """Whether copies into slots of the cache are under way: nothing is declared meanwhile."""

    def declare(self) -> Sequence[DeclaredBlock]:
        """Every device block that is not free. Called on the loop's thread, inside CachePort.poll."""


@dataclass(frozen=True, slots=True)
class Reopened:
    """The cache had been restarted and knows our blocks again. Unanswered batches are void: what they meant is in
    the declaration, or has to be asked anew."""

    counts: Counts
    segments: Sequence[Segment] = ()
    lower: LowerTiers = field(default_factory=LowerTiers)


@dataclass(frozen=True, slots=True)
class Fenced:
    """A higher incarnation of this executor's name has opened the cache: stop."""

    reason: str


class CachePort(Protocol):
    """Batches go out in order; each is answered once. Numbers batches itself (Batch.op_seq is ignored)."""

    @property
    def connected(self) -> bool:
        """Whether the cache answers."""

    def send(self, batch: Batch) -> None:
        """Sends; returns at once."""

    @property
    def unanswered(self) -> int:
        """Batches sent and not yet answered; the loop keeps it below 8."""

    def poll(self) -> BatchAnswer | Reopened | Fenced | None:
        """The next answer or event, in order, or None."""

    def lookup(self, chains: Sequence[Chain]) -> None:
        """Asks for hits; a newer call replaces an unanswered one."""

    def poll_hits(self) -> Sequence[tuple[Chain, ChainHits]] | None:
        """The hits of the last lookup, once, when they are there."""

    def tell(self, call: TicketCall) -> None:
        """Answers a ticket or asks for a prefetch; returns at once. Lost with a cache that is restarted."""

    def poll_ticket(self) -> TicketEvent | None:
        """The next order or offer of the cache, or None. What is open comes again after a broken stream."""


@dataclass(frozen=True, slots=True)
class StoreCopied:
    """The blocks of a store are in their slots; one xxh3_64 a block."""

    job: int
    checksums: Sequence[int]


@dataclass(frozen=True, slots=True)
class LoadCopied:
    """Of a part of `blocks` blocks, the first `good` were copied and are what they should be."""

    job: int
    blocks: int
    good: int


class CopyPort(Protocol):
    """Copies between device blocks and slots of the CPU tier, beside the steps. Each job ends once, in any order."""

    def attach(self, segments: Sequence[Segment]) -> None:
        """The CPU tier of a cache that was opened; jobs of an earlier one still end."""

    def store(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], *, urgent: bool) -> None:
        """Copies blocks into slots; returns at once. Urgent ones go before all that are not."""

    def hurry(self, job: int) -> None:
        """A store that was not urgent is, if it has not ended."""

    def load(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], checksums: Sequence[int]) -> None:
        """Copies slots into blocks, and verifies checksum and generation; returns at once. Goes before stores."""

    def poll(self) -> StoreCopied | LoadCopied | None:
        """A job that has ended, or None."""

    def rates(self) -> CopyRates:
        """What copies cost."""

    def moved(self) -> Moved:
        """All that was copied, and how long that took."""


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Measured, 0 unknown; `queue_us`: until a load that is asked for now would begin, `out_queue_us`: an urgent
    store."""

    to_host_bytes_per_s: int = 0
    to_device_bytes_per_s: int = 0
    queue_us: int = 0
    out_queue_us: int = 0


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that were copied out of the device and into it so far, and the microseconds that copying them took."""

    out_bytes: int = 0
    out_us: int = 0
    in_bytes: int = 0
    in_us: int = 0


class Hasher(Protocol):
    """Computes block keys away from the loop's thread."""

    def ready(self, request: LiveRequest) -> bool:
        """Whether the keys of all that the request has are computed; if not, sees to it and rings."""


class RatesPort(Protocol):
    """Learns what steps cost."""

    def observe(self, plan: StepPlan, step_us: int) -> None:
        """A step that took so long."""

    def current(self) -> Rates:
        """What is known."""


class ModelPort(Protocol):
    """Steps are computed in the order of their launches, and polled in it."""

    @property
    def queues(self) -> bool:
        """Whether a second step may be launched while one is in flight, its tokens named by `step_plan.drawn_by`."""

    @property
    def busy(self) -> bool:
        """Whether a launched step has not been polled yet."""

    def launch(self, plan: StepPlan) -> None:
        """Starts, or queues; returns at once."""

    def poll(self) -> StepResult | None:
        """The result of the oldest launched step, once, when it has ended. Raises what the step raised."""
