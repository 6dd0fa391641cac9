"""Lower tiers with real bytes below ledgers: an executor that copies when it is told to, a disk that works when it is.

A block's bytes are its key, as long as everything is right. Every copy is made at the moment at which a test says so; a
load checks what a real one checks, the checksum and the slot's generation. The audit runs after every step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cache_svc.audit import audit
from cache_svc.blocks import BlockTable
from cache_svc.disk_jobs import DiskEntry, DiskHeader, DiskJob, DiskRead, DiskWrite
from cache_svc.ledger import Ledger
from cache_svc.pins import Owner
from cache_svc.tier_audit import audit_tiers
from cache_svc.tiers import TierLimits, Tiers
from jitney.block_ops import (
    Acquire,
    Batch,
    BatchAnswer,
    Block,
    BlockState,
    Chain,
    ChainHits,
    Release,
    RequestId,
    Reserve,
    ReserveResult,
    Return,
    Swap,
    SwapResult,
    Tier,
    block_id,
)
from jitney.ticket_ops import (
    AbortTicket,
    LoadDone,
    LoadReady,
    Slot,
    StoreDone,
    StoreOrder,
    Ticket,
    TicketCall,
    TicketLost,
    slot_generation,
    slot_id,
)
from tests.support.ledger_rig import BLOCK_TOKENS, OK, Prompt

GARBAGE = b"garbage"


def checksum(data: bytes) -> int:
    """Of a block's bytes."""
    return zlib.crc32(data)


@dataclass
class LoadUnderWay:
    """What the executor knows of a load."""

    ready: list[tuple[Slot, int]]
    lost: int | None = None


class TierRig:
    """One cache process: tiers, the bytes of its slots, its disk, and the devices of its executors."""

    def __init__(self, limits: TierLimits, disk: dict[int, tuple[DiskEntry, bytes]] | None = None) -> None:
        self.tiers = Tiers(limits)
        self.generations = [0] * limits.cpu_slots
        self.slots: list[bytes] = [GARBAGE] * limits.cpu_slots
        self.disk = {} if disk is None else disk
        self.jobs: list[DiskJob] = []
        self.devices: list[DeviceRig] = []

    def device(self, blocks: int, name: str = "e", epoch: int = 1) -> DeviceRig:
        """Another executor."""
        device = DeviceRig(self, blocks, (name, epoch))
        self.devices.append(device)
        return device

    def scan(self) -> None:
        """Tells what is on the disk."""
        for slot, (entry, _) in list(self.disk.items()):
            self.tiers.found(slot, entry)
        self.settle()

    def settle(self) -> None:
        """Takes what is new, in the right order, and audits."""
        self.tiers.pump()
        for slot, generation in self.tiers.take_generations():
            assert generation > self.generations[slot]
            self.generations[slot] = generation
        self.jobs += self.tiers.take_jobs()
        for device in self.devices:
            device.hear()
        self.check()

    def check(self) -> None:
        """The audits find nothing."""
        findings = audit_tiers(self.tiers)
        for device in self.devices:
            findings += audit(device.ledger)
        assert not findings, findings

    def work(self, *, ok: bool = True, jobs: int = 1 << 30) -> int:
        """The disk does the oldest jobs, or fails to; how many there were."""
        chosen, self.jobs = self.jobs[:jobs], self.jobs[jobs:]
        for job in chosen:
            self.do(job, ok=ok)
        return len(chosen)

    def do(self, job: DiskJob, *, ok: bool = True) -> None:
        """The disk does this job."""
        match job:
            case DiskWrite():
                if ok:
                    self.disk[job.disk_slot] = (job.entry, self.slots[slot_id(job.cpu_slot)])
                self.tiers.written(job.job, ok=ok)
            case DiskRead():
                entry, data = self.disk.get(job.disk_slot, (None, GARBAGE))
                ok = ok and entry is not None and replace(entry, place=job.entry.place) == job.entry
                ok = ok and checksum(data) == job.entry.checksum
                if ok:
                    self.slots[slot_id(job.cpu_slot)] = data
                self.tiers.read(job.job, ok=ok)
            case DiskHeader(entry=None):
                self.disk.pop(job.disk_slot, None)
            case DiskHeader(entry=entry):
                assert entry is not None
                self.disk[job.disk_slot] = (entry, self.disk.get(job.disk_slot, (entry, GARBAGE))[1])
        self.settle()

    def idle(self) -> None:
        """Disk and executors do all that they were asked to."""
        while self.jobs or any(device.stores for device in self.devices):
            self.work()
            for device in self.devices:
                device.store()


class DeviceRig:
    """One executor: its ledger, the bytes of its blocks, and the tickets that it knows."""

    def __init__(self, rig: TierRig, blocks: int, owner: Owner) -> None:
        self.rig = rig
        self.owner = owner
        self.ledger = Ledger(BlockTable(blocks), BLOCK_TOKENS, rig.tiers, owner, b"print")
        self.bytes: list[bytes] = [GARBAGE] * blocks
        self.stores: dict[Ticket, StoreOrder] = {}
        self.ordered: set[Ticket] = set()  # those that were ever heard of
        self.loads: dict[Ticket, LoadUnderWay] = {}
        self.results: dict[Ticket, ReserveResult] = {}
        self.op_seq = 0
        self.last: Batch
        self.answer: BatchAnswer

    def apply(self, **operations: Any) -> BatchAnswer:
        """One batch. What is bound anew holds nothing of use."""
        self.op_seq += 1
        self.last = replace(Batch(self.op_seq), **operations)
        self.answer = answer = self.ledger.apply(self.last)
        for reserved in answer.reserves:
            for block in reserved.blocks:
                self.bytes[block_id(block)] = GARBAGE
            if reserved.ticket:
                self.results[Ticket(reserved.ticket)] = reserved
        for block in answer.granted:
            self.bytes[block_id(block)] = GARBAGE
        self.rig.settle()
        return answer

    def hear(self) -> None:
        """Takes the events that are new."""
        for event in self.rig.tiers.take_events(self.owner):
            match event:
                case StoreOrder():
                    assert event.ticket not in self.ordered or event.urgent
                    if event.ticket in self.stores or event.ticket not in self.ordered:
                        self.stores[event.ticket] = event
                    self.ordered.add(event.ticket)
                case LoadReady():
                    load = self.loads.setdefault(event.ticket, LoadUnderWay([]))
                    assert len(load.ready) == event.first
                    assert load.lost is None or event.first + len(event.slots) <= load.lost
                    load.ready += zip(event.slots, event.checksums, strict=True)
                case TicketLost():
                    self.loads.setdefault(event.ticket, LoadUnderWay([])).lost = event.first

    def tell(self, call: TicketCall) -> None:
        """Says it to the cache."""
        self.rig.tiers.told(self.owner, call)
        self.rig.settle()

    # Stores.

    def copy_out(self, order: StoreOrder) -> StoreDone:
        """Copies what the device has into the slots; not told yet."""
        sums = []
        for block, slot in zip(order.blocks, order.slots, strict=True):
            data = self.bytes[block_id(block)]
            self.rig.slots[slot_id(slot)] = data
            sums.append(checksum(data))
        return StoreDone(order.ticket, sums)

    def store(self, *tickets: Ticket) -> None:
        """Answers these orders, or all."""
        for ticket in tickets or list(self.stores):
            self.tell(self.copy_out(self.stores.pop(ticket)))

    # Loads.

    def copy_in(self, ticket: Ticket) -> int:
        """Copies what is ready into the device's blocks; how many are good."""
        targets = self.results[ticket].blocks
        for at, (slot, expected) in enumerate(self.loads[ticket].ready):
            data = self.rig.slots[slot_id(slot)]
            if checksum(data) != expected or self.rig.generations[slot_id(slot)] != slot_generation(slot):
                return at
            self.bytes[block_id(targets[at])] = data
        return len(self.loads[ticket].ready)

    def load(self, ticket: int) -> int:
        """Copies what is ready and ends the ticket; how many blocks were good."""
        good = self.copy_in(Ticket(ticket))
        del self.loads[Ticket(ticket)]
        self.tell(LoadDone(Ticket(ticket), good))
        return good

    def abort(self, ticket: int) -> None:
        """Ends a ticket without a copy."""
        self.stores.pop(Ticket(ticket), None)
        self.loads.pop(Ticket(ticket), None)
        self.tell(AbortTicket(Ticket(ticket)))

    # Requests.

    def board(self, request: int, wanted: Prompt, extra: int = 0, load: int = 0) -> ReserveResult:
        """Acquire and Reserve of the prompt and `extra` blocks, with at most `load` of it from below."""
        answer = self.apply(
            acquires=[Acquire(RequestId(request), wanted.keys)],
            reserves=[Reserve(RequestId(request), wanted.keys, len(wanted.keys) + extra, load)],
        )
        return answer.reserves[0]

    def compute(self, request: int, wanted: Prompt, blocks: Sequence[Block], first: int, tenant: str = "t") -> None:
        """Fills these blocks of the prompt, the first of which is its block `first`, and seals them."""
        for block, key in zip(blocks, wanted.keys[first:], strict=False):
            self.bytes[block_id(block)] = key
        blocks = blocks[: len(wanted.keys) - first]
        assert self.apply(seals=[wanted.seal(request, blocks, first, tenant)]).seals == [[OK] * len(blocks)]

    def cache(self, request: int, wanted: Prompt, tenant: str = "t") -> None:
        """Has the request compute what is missing of the prompt; it holds all of it then."""
        reserved = self.board(request, wanted)
        assert reserved.code is OK
        if reserved.blocks:
            self.compute(request, wanted, reserved.blocks, len(wanted.keys) - len(reserved.blocks), tenant)

    def release(self, *requests: int) -> BatchAnswer:
        """They let go of all."""
        return self.apply(releases=[Release(RequestId(request)) for request in requests])

    def swap(self, request: int, tier: Tier) -> SwapResult:
        """The request is preempted."""
        return self.apply(swaps=[Swap(RequestId(request), tier)]).swaps[0]

    def hits(self, wanted: Prompt, request: int = 999) -> ChainHits:
        """What a look-up finds."""
        return self.ledger.lookup(Chain(RequestId(request), wanted.keys))

    def where(self, wanted: Prompt) -> tuple[int, int, int]:
        """Blocks of the prompt on the device, in the CPU tier, and on the SSD."""
        hits = self.hits(wanted)
        return hits.device_blocks, hits.cpu_blocks, hits.ssd_blocks

    def evict_all(self) -> None:
        """Has others use every block that nobody holds, and give them back."""
        total = self.ledger.blocks.total
        granted = self.apply(grant=total).granted
        self.apply(returns=[Return(granted)])

    def right(self) -> bool:
        """Whether every block that can be found has the bytes that its key promises."""
        table = self.ledger.blocks
        states = (BlockState.SEALED, BlockState.CACHED)
        return all(
            self.bytes[block] == table.index.key[block] for block in range(table.total) if table.state[block] in states
        )
