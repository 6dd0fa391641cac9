"""An executor of a cache process, with real bytes: it holds its lock, maps the segments, copies as it is told.

A block's bytes follow from its key, so that what comes back can be judged. The events of its tickets are read by a
thread and wait until the test has it `work`.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import xxhash
from numpy.typing import NDArray

from executor_svc.lock_file import LockFile
from jitney.block_ops import (
    Acquire,
    Block,
    Chain,
    ChainHits,
    Release,
    RequestId,
    Reserve,
    ReserveResult,
    Return,
    Segment,
    Swap,
    SwapResult,
    Tier,
    block_id,
)
from jitney.cache.v1 import cache_pb2 as pb
from jitney.chain_codec import decode_hits, encode_chains
from jitney.keys import Key
from jitney.ticket_codec import decode_event, encode_call
from jitney.ticket_ops import (
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
from tests.support.cache_caller import Client
from tests.support.ledger_rig import BLOCK_TOKENS, OK, Prompt

BLOCK_BYTES = 20_000


class Slots:
    """The segments, mapped."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._slots: list[NDArray[np.uint8]] = []
        self._tables: list[NDArray[np.uint32]] = []
        for segment in segments:
            with open(segment.path, "r+b") as file:
                room = mmap.mmap(file.fileno(), segment.bytes)
            size = segment.slots * segment.slot_bytes
            self._slots.extend(np.frombuffer(room, np.uint8, size).reshape(segment.slots, -1))
            self._tables.extend(np.frombuffer(room, "<u4", segment.slots, size).reshape(-1, 1))

    def bytes_of(self, number: int) -> NDArray[np.uint8]:
        """Of a slot."""
        return self._slots[number][:BLOCK_BYTES]

    def current(self, slot: Slot) -> bool:
        """Whether it is still what was said."""
        return int(self._tables[slot_id(slot)][0]) == slot_generation(slot)


def checksum(data: NDArray[np.uint8]) -> int:
    """Of a block's bytes."""
    return xxhash.xxh3_64_intdigest(data.tobytes())


def content(key: Key, size: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    """The bytes of the block with that key."""
    return np.random.default_rng(int.from_bytes(key[:8], "little")).integers(0, 256, size, np.uint8)


class TierExecutor(Client):
    """Use it as a context."""

    def __init__(
        self, target: str, folder: Path, *, executor: str = "executor-0", incarnation: int = 1, blocks: int = 16
    ) -> None:
        super().__init__(target, executor, incarnation)
        self.lock = LockFile(folder / f"{executor}-{incarnation}.lock")
        self.blocks = blocks
        self.pool = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        self.results: dict[int, ReserveResult] = {}
        self.good: dict[int, int] = {}  # of loads, blocks so far
        self.ended: dict[int, int] = {}  # of loads, good blocks in all
        self.segments: list[Segment] = []
        self.events: queue.SimpleQueue[StoreOrder | LoadReady | TicketLost] = queue.SimpleQueue()
        self.broken: BaseException | None = None
        self.stored: dict[Ticket, StoreDone] = {}
        self._calls: queue.SimpleQueue[pb.TicketCall | None] = queue.SimpleQueue()
        self._tickets: Any = None

    def __enter__(self) -> TierExecutor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.close()
        self.lock.close()

    def start(self) -> None:
        """Opens the cache and the stream of tickets."""
        answer = self.call(
            self.stub.Open,
            pb.OpenRequest(
                executor=self.executor,
                incarnation=self.incarnation,
                fingerprint=b"fingerprint",
                blocks=self.blocks,
                block_bytes=BLOCK_BYTES,
                block_tokens=BLOCK_TOKENS,
                lock_path=str(self.lock.path),
            ),
        )
        self.epoch, self.boot_id, self.op_seq = answer.epoch, answer.boot_id, 0
        self.stored.clear()  # tickets are counted anew in each epoch
        self.segments = [Segment(each.path, each.bytes, each.slots, each.slot_bytes) for each in answer.segments]
        self.slots = Slots(self.segments)
        self.listen()

    def listen(self) -> None:
        """Opens a new stream of tickets."""
        self.stop()
        self._calls, self.broken = queue.SimpleQueue(), None
        self._tickets = self.stub.Tickets(iter(self._calls.get, None))
        self.tell(None)
        threading.Thread(target=self._read, args=(self._tickets,), daemon=True).start()

    def stop(self) -> None:
        """Breaks the stream of tickets."""
        if self._tickets is not None:
            self._tickets.cancel()
            self._calls.put(None)
            self._tickets = None

    def tell(self, call: TicketCall | None) -> None:
        """Says something of a ticket."""
        self.say(self._signed(encode_call(call)))

    def say(self, message: pb.TicketCall) -> None:
        """Sends a message, whosever it is."""
        self._calls.put(message)

    def hello(self) -> pb.TicketCall:
        """The first word of a stream."""
        return self._signed(encode_call(None))

    def _signed(self, message: pb.TicketCall) -> pb.TicketCall:
        message.executor, message.epoch, message.boot_id = self.executor, self.epoch, self.boot_id
        return message

    def work(self, done: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Copies what it is told to, until that is so."""
        end = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < end, f"nothing after {timeout_s:g} s"
            try:
                self.handle(self.events.get(timeout=0.02))
            except queue.Empty:
                continue

    def handle(self, event: StoreOrder | LoadReady | TicketLost) -> None:
        """Copies, and says so."""
        match event:
            case StoreOrder():
                self.tell(self.copied_out(event))
            case LoadReady():
                self._copy_in(event)
            case TicketLost() if event.ticket in self.results:
                self._end(event.ticket)
            case _:
                pass

    def copied_out(self, order: StoreOrder) -> StoreDone:
        """Copies what is ordered, once: an order may come again as urgent. Not told yet."""
        if order.ticket not in self.stored:
            for block, slot in zip(order.blocks, order.slots, strict=True):
                self.slots.bytes_of(slot_id(slot))[:] = self.pool[block_id(block)]
            checksums = [checksum(self.slots.bytes_of(slot_id(slot))) for slot in order.slots]
            self.stored[order.ticket] = StoreDone(order.ticket, checksums)
        return self.stored[order.ticket]

    def _copy_in(self, ready: LoadReady) -> None:
        targets = self.results[ready.ticket].blocks[ready.first : ready.first + len(ready.slots)]
        for block, slot, expected in zip(targets, ready.slots, ready.checksums, strict=True):
            self.pool[block_id(block)] = self.slots.bytes_of(slot_id(slot))
            if checksum(self.pool[block_id(block)]) != expected or not self.slots.current(slot):
                self._end(ready.ticket)
                return
            self.good[ready.ticket] += 1
        reserved = self.results[ready.ticket]
        if self.good[ready.ticket] == reserved.cpu_blocks + reserved.ssd_blocks:
            self._end(ready.ticket)

    def _end(self, ticket: Ticket) -> None:
        del self.results[ticket]
        self.ended[ticket] = self.good.pop(ticket)
        self.tell(LoadDone(ticket, self.ended[ticket]))

    def _read(self, tickets: Any) -> None:
        try:
            for message in tickets:
                self.events.put(decode_event(message))
        except grpc.RpcError as error:
            if self._tickets is tickets:
                self.broken = error

    # Requests.

    def board(self, request: int, wanted: Prompt, load: int = 0) -> ReserveResult:
        """Acquire and Reserve of the prompt, with at most `load` blocks of it from below."""
        answer = self.apply(
            acquires=[Acquire(RequestId(request), wanted.keys)],
            reserves=[Reserve(RequestId(request), wanted.keys, len(wanted.keys), load)],
        )
        (reserved,) = answer.reserves
        if reserved.ticket:
            self.results[reserved.ticket], self.good[reserved.ticket] = reserved, 0
        return reserved

    def compute(self, request: int, wanted: Prompt, blocks: Sequence[Block], tenant: str = "default") -> None:
        """Fills the last blocks of the prompt, and seals them."""
        first = len(wanted.keys) - len(blocks)
        for block, key in zip(blocks, wanted.keys[first:], strict=True):
            self.pool[block_id(block)] = content(key)
        answer = self.apply(seals=[wanted.seal(request, blocks, first, tenant)])
        assert answer.seals == [[OK] * len(blocks)]

    def cache(self, request: int, wanted: Prompt, tenant: str = "default") -> None:
        """Computes what is missing of the prompt; the request holds all of it then."""
        reserved = self.board(request, wanted)
        assert reserved.code is OK
        if reserved.blocks:
            self.compute(request, wanted, reserved.blocks, tenant)

    def swap(self, request: int, tier: Tier) -> SwapResult:
        """The request is preempted."""
        return self.apply(swaps=[Swap(RequestId(request), tier)]).swaps[0]

    def evict_all(self) -> None:
        """Has others use every block that nobody holds."""
        granted = self.apply(grant=self.blocks).granted
        for block in granted:
            self.pool[block_id(block)] = 0
        self.apply(returns=[Return(granted)])

    def swap_is_refused(self, request: int, wanted: Prompt, tier: Tier) -> bool:
        """Computes the prompt and finds that it cannot be swapped there."""
        self.cache(request, wanted)
        pinned = self.swap(request, tier).pinned_blocks
        self.apply(releases=[Release(RequestId(request))])
        self.evict_all()
        return pinned == 0

    def store_below(self, request: int, wanted: Prompt, tier: Tier, tenant: str = "default") -> None:
        """Computes the prompt, and waits until all of it is in that tier and on the device no more."""
        stored = self.tier(tier).stored_blocks
        self.cache(request, wanted, tenant)
        assert self.swap(request, tier).pinned_blocks == len(wanted.keys)
        self.work(lambda: self._is_below(wanted, tier) and self.tier(tier).stored_blocks > stored)
        self.apply(releases=[Release(RequestId(request))])
        self.evict_all()

    def _is_below(self, wanted: Prompt, tier: Tier) -> bool:
        self.evict_all()
        hits = self.hits(wanted)
        below = hits.cpu_blocks if tier is Tier.CPU else hits.cpu_blocks + hits.ssd_blocks
        if tier is Tier.SSD and self.tier(Tier.SSD).used_slots < len(wanted.keys):
            return False
        return hits.device_blocks == 0 and below == len(wanted.keys)

    def load_back(self, request: int, wanted: Prompt) -> ReserveResult:
        """Boards with what is below, and checks every byte that comes; the request holds all of it then."""
        reserved = self.board(request, wanted, len(wanted.keys))
        good = 0
        if reserved.ticket:
            self.work(lambda: reserved.ticket in self.ended)
            good = self.ended[reserved.ticket]
        held = len(wanted.keys) - len(reserved.blocks)
        for block, key in zip(reserved.blocks[:good], wanted.keys[held:], strict=False):
            assert np.array_equal(self.pool[block_id(block)], content(key))
        self.compute(request, wanted, reserved.blocks)
        self.apply(releases=[Release(RequestId(request))])
        return reserved

    def hits(self, wanted: Prompt) -> ChainHits:
        """What a look-up finds."""
        request = encode_chains(self.executor, [Chain(RequestId(999), wanted.keys)])
        return decode_hits(self.call(self.stub.Lookup, request))[0]

    def status(self) -> pb.GetStatusResponse:
        """What the cache says of itself."""
        answer: pb.GetStatusResponse = self.call(self.stub.GetStatus, pb.GetStatusRequest())
        return answer

    def tier(self, tier: Tier) -> pb.TierStatus:
        """What it says of a tier."""
        return next(each for each in self.status().tiers if Tier(each.tier) is tier)

    def audit(self) -> None:
        """It finds nothing."""
        answer = self.call(self.stub.Audit, pb.AuditRequest())
        assert answer.ok, list(answer.findings)
