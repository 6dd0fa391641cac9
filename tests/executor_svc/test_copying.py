"""Tickets in every order: what is copied when, what is answered, and when a request may be let go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from executor_svc.blocks import DeviceBlocks
from executor_svc.copying import Copying
from executor_svc.live_request import LiveRequest, State
from executor_svc.no_copies import NoCopies
from executor_svc.ports import CachePort, LoadCopied, StoreCopied
from executor_svc.request import Submission
from jitney.block_ops import Block, RequestId, ReserveResult, ResultCode, Segment, handle
from jitney.keys import Root, salt_digest
from jitney.ticket_ops import (
    AbortTicket,
    LoadDone,
    LoadReady,
    Slot,
    StoreDone,
    StoreOrder,
    Ticket,
    TicketCall,
    TicketEvent,
    TicketLost,
)
from simulator.cache import VirtualCache
from simulator.clock import VirtualClock
from simulator.text import NumberText

BLOCKS = [handle(i, 1) for i in range(3)]
SLOTS = [Slot(1 << 32 | i) for i in range(3)]
TICKET = Ticket(5)


class Wire(VirtualCache):
    """What the cache has pushed, and what it was told."""

    def __init__(self) -> None:
        super().__init__(VirtualClock(), 16, 4)
        self.pushed: deque[TicketEvent] = deque()
        self.told: list[TicketCall] = []

    def tell(self, call: TicketCall) -> None:
        self.told.append(call)

    def poll_ticket(self) -> TicketEvent | None:
        return self.pushed.popleft() if self.pushed else None


class Slow(NoCopies):
    """Copies that end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, Sequence[Block]]] = []
        self.ended: deque[StoreCopied | LoadCopied] = deque()
        self.hurried: list[int] = []
        self.gone = False  # the files that are to be mapped

    def attach(self, segments: Sequence[Segment]) -> None:
        if self.gone:
            raise FileNotFoundError

    def hurry(self, job: int) -> None:
        self.hurried.append(job)

    def store(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], *, urgent: bool) -> None:
        self.begun.append((job, blocks))

    def load(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], checksums: Sequence[int]) -> None:
        self.begun.append((job, blocks))

    def poll(self) -> StoreCopied | LoadCopied | None:
        return self.ended.popleft() if self.ended else None


class Bench:
    """A request that boarded with three blocks to load."""

    def __init__(self) -> None:
        self.wire, self.slow = Wire(), Slow()
        self.blocks = DeviceBlocks(16, 2, 8, 4)
        cache: CachePort = self.wire
        self.copying = Copying(self.blocks, cache, self.slow)
        submission = Submission("r", np.arange(12, dtype=np.int32), 1, NumberText(()))
        root = Root("", "m", "", b"f")
        self.request = LiveRequest(RequestId(1), submission, root, salt_digest(""), None)
        self.request.state = State.RUNNING
        self.reserved = ReserveResult(ResultCode.OK, BLOCKS, ticket=TICKET, cpu_blocks=2, ssd_blocks=1)

    def board(self, step_in_flight: int = 0) -> None:
        self.copying.expect(self.request, self.reserved, step_in_flight)

    def offer(self, first: int, count: int) -> None:
        self.wire.pushed.append(LoadReady(TICKET, RequestId(1), first, SLOTS[first : first + count], [0] * count))

    def copied(self, good: int) -> None:
        job, blocks = self.slow.begun[-1]
        self.slow.ended.append(LoadCopied(job, len(blocks), good))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_order_that_comes_again_as_urgent_is_hurried(bench: Bench) -> None:
    order = StoreOrder(TICKET, BLOCKS, SLOTS)
    bench.wire.pushed += [order, order, replace(order, urgent=True)]
    bench.copying.turn(0, 0)
    ((job, _),) = bench.slow.begun
    assert bench.slow.hurried == [job]
    bench.slow.ended.append(StoreCopied(job, [0, 0, 0]))
    bench.copying.turn(0, 0)
    bench.wire.pushed.append(replace(order, urgent=True))  # it was on its way
    bench.copying.turn(0, 0)
    assert (len(bench.slow.begun), bench.slow.hurried) == (1, [job])
    assert bench.wire.told == [StoreDone(TICKET, [0, 0, 0])] * 2


def test_a_load_in_two_parts(bench: Bench) -> None:
    bench.board()
    bench.offer(0, 2)
    assert bench.copying.turn(0, 0) == []
    assert [blocks for _, blocks in bench.slow.begun] == [BLOCKS[:2]]
    bench.copied(2)
    assert bench.copying.turn(0, 0) == []
    assert bench.copying.loading
    bench.offer(0, 2)  # pushed again
    bench.offer(2, 1)
    bench.copying.turn(0, 0)
    bench.copied(1)
    ((request, load),) = bench.copying.turn(0, 0)
    assert (request, load.good, request.load) == (bench.request, 3, None)
    assert bench.wire.told == [LoadDone(TICKET, 3)]
    assert not bench.copying.loading
    assert bench.blocks.stored[:4].tolist() == [True, True, True, False]


def test_an_offer_that_was_lost_with_its_stream_comes_with_what_is_known(bench: Bench) -> None:
    bench.board()
    bench.offer(0, 2)
    bench.copying.turn(0, 0)
    bench.offer(0, 3)  # of a new stream
    bench.copying.turn(0, 0)
    assert [blocks for _, blocks in bench.slow.begun] == [BLOCKS[:2], BLOCKS[2:]]


def test_what_is_offered_before_the_answer_came_is_kept(bench: Bench) -> None:
    bench.offer(0, 3)
    bench.copying.turn(0, 0)
    assert not bench.slow.begun
    bench.board()
    bench.copying.turn(0, 0)
    assert [blocks for _, blocks in bench.slow.begun] == [BLOCKS]


def test_a_load_waits_for_the_step_that_may_use_its_blocks(bench: Bench) -> None:
    bench.board(step_in_flight=7)
    bench.offer(0, 3)
    bench.copying.turn(7, 0)
    assert not bench.slow.begun
    bench.copying.turn(8, 0)  # another step runs: it was launched after the blocks were freed
    assert bench.slow.begun


@pytest.mark.parametrize("offered", [0, 2])
def test_what_will_not_come_is_computed(bench: Bench, offered: int) -> None:
    bench.board()
    if offered:
        bench.offer(0, offered)
        bench.copying.turn(0, 0)
        bench.copied(offered)
    bench.wire.pushed.append(TicketLost(TICKET, offered))
    ((_, load),) = bench.copying.turn(0, 0)
    assert load.good == offered
    assert bench.wire.told == [LoadDone(TICKET, offered)]


def test_nothing_is_copied_behind_a_bad_block(bench: Bench) -> None:
    bench.board()
    bench.offer(0, 2)
    bench.copying.turn(0, 0)
    bench.offer(2, 1)
    bench.copied(1)
    ((_, load),) = bench.copying.turn(0, 0)
    assert (load.good, len(bench.slow.begun)) == (1, 1)
    assert bench.wire.told == [LoadDone(TICKET, 1)]


def test_a_request_that_ends_is_let_go_when_its_copies_have_ended(bench: Bench) -> None:
    bench.board()
    bench.offer(0, 2)
    bench.copying.turn(0, 0)
    bench.request.state = State.ENDED
    bench.offer(2, 1)
    assert bench.copying.turn(0, 0) == []
    assert bench.request.load is not None
    bench.copied(2)
    assert bench.copying.turn(0, 0) == []
    assert bench.request.load is None
    assert bench.wire.told == [AbortTicket(TICKET)]
    assert len(bench.slow.begun) == 1


def test_a_load_for_nobody_is_refused(bench: Bench) -> None:
    bench.offer(0, 3)
    bench.copying.turn(0, 0)
    bench.copying.refuse(bench.reserved)
    assert bench.wire.told == [AbortTicket(TICKET)]
    bench.copying.turn(0, 0)
    assert not bench.slow.begun


def test_an_answer_that_a_broken_stream_lost_is_given_again(bench: Bench) -> None:
    order = StoreOrder(TICKET, BLOCKS, SLOTS)
    bench.wire.pushed.append(order)
    bench.copying.turn(3, 0)
    bench.wire.pushed.append(order)
    bench.copying.turn(3, 0)
    assert len(bench.slow.begun) == 1  # stores do not wait for steps, and are done once
    bench.slow.ended.append(StoreCopied(bench.slow.begun[0][0], [1, 2, 3]))
    bench.copying.turn(3, 0)
    bench.wire.pushed.append(order)
    bench.copying.turn(3, 0)
    assert bench.wire.told == [StoreDone(TICKET, [1, 2, 3])] * 2
    assert bench.blocks.stored[:3].all()


def test_after_a_restart_of_the_cache_nobody_is_told(bench: Bench) -> None:
    bench.board()
    bench.offer(0, 2)
    bench.wire.pushed.append(StoreOrder(Ticket(6), BLOCKS, SLOTS))
    bench.copying.turn(0, 0)
    bench.copying.reopened()
    assert bench.copying.turn(0, 0) == []
    assert bench.request.load is not None  # its copy writes device blocks still
    (load_job, _), (store_job, _) = sorted(bench.slow.begun, key=lambda each: len(each[1]))
    bench.wire.pushed.append(StoreOrder(Ticket(6), BLOCKS[:1], SLOTS[:1]))  # the new cache counts from one again
    bench.slow.ended += [LoadCopied(load_job, 2, 2), StoreCopied(store_job, [1, 2, 3])]
    ((_, load),) = bench.copying.turn(0, 0)
    assert load.good == 2
    assert bench.wire.told == []
    assert not bench.copying.loading


def test_a_cache_that_goes_again_before_its_memory_is_mapped_harms_nobody(bench: Bench) -> None:
    segment = Segment("nowhere", 1 << 20, 4, 4096)
    bench.slow.gone = True
    bench.copying.attach([segment])
    bench.copying.reopened()
    bench.board()
    bench.offer(0, 2)
    bench.wire.pushed.append(StoreOrder(Ticket(6), BLOCKS, SLOTS))
    ((_, load),) = bench.copying.turn(0, 0)
    assert (load.good, bench.slow.begun) == (0, [])
    assert bench.wire.told == [AbortTicket(Ticket(6)), LoadDone(TICKET, 0)]
    bench.slow.gone = False
    bench.copying.attach([segment])
    bench.wire.pushed.append(StoreOrder(Ticket(7), BLOCKS, SLOTS))
    bench.copying.turn(0, 0)
    assert len(bench.slow.begun) == 1


def test_a_block_that_was_given_away_while_it_was_copied_is_not_stored(bench: Bench) -> None:
    bench.wire.pushed.append(StoreOrder(TICKET, BLOCKS, SLOTS))
    bench.copying.turn(0, 0)
    bench.blocks.mark_new([handle(1, 2)])  # evicted, and reserved in its next generation
    bench.slow.ended.append(StoreCopied(bench.slow.begun[0][0], [1, 2, 3]))
    bench.copying.turn(0, 0)
    assert bench.blocks.stored[:3].tolist() == [True, False, True]
