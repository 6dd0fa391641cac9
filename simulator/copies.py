"""Modelled copies between the device and the CPU tier: two queues, one each way, with bandwidths and delays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from executor_svc.ports import CopyRates, LoadCopied, Moved, StoreCopied
from jitney.block_ops import Block, Segment, block_id
from jitney.columns import U64
from jitney.ticket_ops import Slot
from simulator.clock import VirtualClock
from simulator.slots import Slots, Transfer
from simulator.tiers import TierModel


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    blocks: Sequence[Block]
    slots: Sequence[Slot]
    tier: Slots
    expected: Sequence[int] = ()  # checksums of a load
    found: list[int] = field(default_factory=list)


class VirtualCopies:
    """CopyPort on the virtual clock. `pool` is the model's: [blocks, tokens of a block]."""

    def __init__(self, clock: VirtualClock, pool: U64, model: TierModel) -> None:
        """The tier is put in later."""
        self._clock, self._pool, self._block_bytes = clock, pool, model.block_bytes
        self._tier = Slots(0, pool.shape[1])
        self.out, self.into = model.out, model.into
        self.believed: Callable[[CopyRates], CopyRates] = lambda measured: measured
        self._urgent: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._loads: deque[_Job] = deque()
        self._storing = self._loading = False
        self._done: deque[StoreCopied | LoadCopied] = deque()
        self.stored_blocks = self.loaded_blocks = 0

    def attach(self, segments: Sequence[Segment]) -> None:
        """The tier is handed over by `put_in`: there are no files."""

    def put_in(self, tier: Slots) -> None:
        """Another tier, of a cache that was started anew. Copies under way go to and from the old one."""
        self._tier = tier

    def store(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], *, urgent: bool) -> None:
        """Behind other stores, an urgent one in front of all that are not."""
        (self._urgent if urgent else self._stores).append(_Job(job, blocks, slots, self._tier))
        if not self._storing:
            self._next_store()

    def hurry(self, job: int) -> None:
        """The block of it that is under way ends where it is."""
        for store in [store for store in self._stores if store.number == job]:
            self._stores.remove(store)
            self._urgent.append(store)

    def load(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], checksums: Sequence[int]) -> None:
        """Behind other loads."""
        self._loads.append(_Job(job, blocks, slots, self._tier, checksums))
        if not self._loading:
            self._next_load()

    def poll(self) -> StoreCopied | LoadCopied | None:
        """See CopyPort."""
        return self._done.popleft() if self._done else None

    @property
    def busy(self) -> bool:
        """Whether anything is under way or not polled."""
        return self._storing or self._loading or bool(self._done)

    def rates(self) -> CopyRates:
        """What was measured, as `believed` sees it."""
        into = self.into.measured or self.out.measured
        out = self.out.measured or into
        waits = (
            int(sum(len(job.blocks) - len(job.found) for job in jobs) * self._block_bytes * 1e6 / rate) if rate else 0
            for jobs, rate in ((self._loads, into), (self._urgent, out))
        )
        return self.believed(CopyRates(int(out), int(into), *waits))

    def moved(self) -> Moved:
        """See CopyPort."""
        return Moved(self.out.moved_bytes, self.out.busy_us, self.into.moved_bytes, self.into.busy_us)

    def _next_store(self) -> None:
        queue = self._urgent or self._stores
        self._storing = bool(queue)
        if self._storing:
            self._store_block(queue[0])

    def _store_block(self, job: _Job) -> None:
        index = len(job.found)
        transfer = Transfer(self._pool[block_id(job.blocks[index])], job.tier.block(job.slots[index]))
        took_us = self.out.took_us(self._block_bytes)

        def end() -> None:
            job.found.append(transfer.end())
            self.out.learn(self._block_bytes, took_us)
            self.stored_blocks += 1
            if len(job.found) == len(job.blocks):
                (self._urgent if job in self._urgent else self._stores).remove(job)
                self._done.append(StoreCopied(job.number, job.found))
            self._next_store()

        self._clock.after(took_us, end)

    def _next_load(self) -> None:
        self._loading = bool(self._loads)
        if self._loading:
            self._load_block(self._loads[0])

    def _load_block(self, job: _Job) -> None:
        index, slot = len(job.found), job.slots[len(job.found)]
        transfer = Transfer(job.tier.block(slot), self._pool[block_id(job.blocks[index])])
        took_us = self.into.took_us(self._block_bytes)

        def end() -> None:
            checksum = transfer.end()
            self.into.learn(self._block_bytes, took_us)
            good = checksum == job.expected[index] and job.tier.current(slot)
            if good:
                job.found.append(checksum)
                self.loaded_blocks += 1
            if good and len(job.found) < len(job.blocks):
                self._load_block(job)
            else:
                self._done.append(LoadCopied(job.number, len(job.blocks), len(job.found)))
                self._loads.popleft()
                self._next_load()

        self._clock.after(took_us, end)
