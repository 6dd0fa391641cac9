"""The executor's client of the cache, against the real process: the loop's side is this thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import pytest

from executor_svc.cache_client import MAX_UNANSWERED, CacheClient
from executor_svc.cache_pool import CachePool
from executor_svc.clock import MonotonicClock
from executor_svc.ports import CachePort, Fenced, Reopened
from jitney.block_ops import Batch, BatchAnswer, Block, BlockState, Chain, DeclaredBlock, Release, RequestId
from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache.v1 import cache_pb2_grpc
from jitney.errors import Away, Conflict, InvalidRequest
from jitney.service_process import ServiceProcess
from jitney.serving.channels import sync_channel
from tests.support.breaking_proxy import BreakingProxy
from tests.support.ledger_rig import BLOCK_TOKENS, Prompt, boarding, prompt
from tests.support.processes import service, wait_until

T = TypeVar("T")
A, B = RequestId(1), RequestId(2)


class Talker:
    """An asyncio loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def call(self, function: Callable[[], object]) -> None:
        async def work() -> None:
            function()

        self.run(work())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class State:
    """CacheState: what a test says there is, and the thread that was asked."""

    def __init__(self) -> None:
        self.blocks: list[DeclaredBlock] = []
        self.asked_on: list[int] = []

    @property
    def storing(self) -> bool:
        return False

    def declare(self) -> Sequence[DeclaredBlock]:
        self.asked_on.append(threading.get_ident())
        return list(self.blocks)


@pytest.fixture
def talker() -> Iterator[Talker]:
    made = Talker()
    yield made
    made.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service("cache_svc", folder=tmp_path_factory.mktemp("cache")) as process:
        yield process


class Executor:
    """A client with its clock, as a loop would have it."""

    def __init__(self, target: str, talker: Talker, incarnation: int = 1, name: str = "executor-0") -> None:
        self.clock, self.state, self._talker = MonotonicClock(), State(), talker
        pool = CachePool(name, incarnation, b"print", 64, 1024, BLOCK_TOKENS)
        self.client = CacheClient(target, pool, self.clock, self.state)
        talker.run(self.client.open(30))

    def next(self) -> BatchAnswer | Reopened | Fenced:
        """The next event; waits by the bell, as the loop does."""
        end = time.monotonic() + 30
        while (event := self.client.poll()) is None:
            assert time.monotonic() < end, "no event"
            self.clock.wait(self.clock.now_us() + 1_000_000)
        return event

    def answer(self, **operations: Any) -> BatchAnswer:
        self.client.send(Batch(0, **operations))
        event = self.next()
        assert isinstance(event, BatchAnswer)
        return event

    def close(self) -> None:
        self._talker.run(self.client.close())


@contextlib.contextmanager
def executor(target: str, talker: Talker, incarnation: int = 1, name: str = "executor-0") -> Iterator[Executor]:
    made = Executor(target, talker, incarnation, name)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def proxied(talker: Talker, port: int) -> Iterator[BreakingProxy]:
    async def make() -> BreakingProxy:
        proxy = BreakingProxy(port)
        await proxy.start()
        return proxy

    proxy = talker.run(make())
    try:
        yield proxy
    finally:
        talker.run(proxy.stop())


def declared(wanted: Prompt, blocks: Sequence[Block], *holders: RequestId) -> list[DeclaredBlock]:
    return [
        DeclaredBlock(
            block,
            BlockState.SEALED,
            wanted.keys[at],
            wanted.keys[at - 1] if at else wanted.root,
            wanted.seal(1, [block], at).token_ids,
            holders=holders,
        )
        for at, block in enumerate(blocks)
    ]


def restart(process: ServiceProcess) -> None:
    process.signal(signal.SIGKILL)
    wait_until(lambda: process.ended() is not None)
    process.start()
    wait_until(lambda: process.listens() and process.serves())


def is_port(client: CacheClient) -> CachePort:
    return client


def test_batches_are_numbered_and_answered_in_order(cache: ServiceProcess, talker: Talker) -> None:
    with executor(cache.target, talker) as one:
        assert is_port(one.client).unanswered == 0
        for _ in range(MAX_UNANSWERED):
            one.client.send(Batch(77, grant=1))
        answers = [one.next() for _ in range(MAX_UNANSWERED)]
        assert [a.op_seq for a in answers if isinstance(a, BatchAnswer)] == list(range(1, 9))
        assert one.client.unanswered == 0
        assert one.client.connected
        assert one.client.poll() is None


def test_lookups(cache: ServiceProcess, talker: Talker) -> None:
    with executor(cache.target, talker) as one:
        wanted = prompt(1, 2)
        blocks = one.answer(**boarding((1, wanted, 0))).reserves[0].blocks
        one.answer(seals=[wanted.seal(1, blocks)])
        chains = [Chain(B, wanted.keys), Chain(RequestId(3), prompt(5).keys)]
        one.client.lookup([])
        one.client.lookup(chains)
        found: list[tuple[Chain, Any]] = []
        while not found:
            one.clock.wait(one.clock.now_us() + 1_000_000)
            found = list(one.client.poll_hits() or ())
        assert [(chain, hits.device_blocks) for chain, hits in found] == [(chains[0], 2), (chains[1], 0)]
        assert one.client.poll_hits() is None


def test_a_cut_stream_is_resumed_without_loss_or_repetition(cache: ServiceProcess, talker: Talker) -> None:
    with proxied(talker, cache.port) as proxy, executor(f"127.0.0.1:{proxy.port}", talker) as one:
        first = one.answer(grant=2)
        for round_ in range(4):
            talker.call(lambda: proxy.hold_answers(True))
            one.client.send(Batch(0, grant=1))
            one.client.send(Batch(0, grant=1))
            time.sleep(0.05)  # the cache has applied them; the answers are held back and will be lost
            talker.call(proxy.cut)
            answers = [one.next(), one.next()]
            assert [a.op_seq for a in answers if isinstance(a, BatchAnswer)] == [2 * round_ + 2, 2 * round_ + 3]
        assert proxy.connections >= 5
        assert one.answer().counts.granted == len(first.granted) + 8
        assert one.state.asked_on == []


def test_a_restarted_cache_is_told_on_the_loops_thread(tmp_path: Path, talker: Talker) -> None:
    with service("cache_svc", folder=tmp_path) as process, executor(process.target, talker) as one:
        for round_ in range(2):
            wanted = prompt(1, 2, round_)
            answer = one.answer(**boarding((1, wanted, 1)))
            new = answer.reserves[0].blocks
            chain = [*answer.acquires[0].blocks, *new[:-1]]
            one.answer(seals=[wanted.seal(1, new[:-1], len(chain) - len(new) + 1)])
            one.state.blocks = [
                *declared(wanted, chain, A),
                DeclaredBlock(new[-1], BlockState.WRITING, holders=[A]),
            ]
            restart(process)
            one.client.send(Batch(0, grant=5))  # void: the declaration does not know of it
            event = one.next()
            assert isinstance(event, Reopened)
            assert (event.counts.free, event.counts.granted, event.counts.total) == (60, 0, 64)
            assert one.client.unanswered == 0
            again = one.answer(**boarding((2, wanted, 0)))
            assert again.op_seq == 1
            assert again.acquires[0].blocks == chain
            assert one.answer(releases=[Release(A), Release(B)]).counts.evictable == 3
        assert one.state.asked_on == [threading.get_ident()] * 2


def test_nothing_is_sent_between_the_loss_and_reopened(tmp_path: Path, talker: Talker) -> None:
    with service("cache_svc", folder=tmp_path) as process, executor(process.target, talker) as one:
        one.answer(grant=1)
        restart(process)
        wait_until(lambda: one.client.unanswered == MAX_UNANSWERED)
        assert one.client.poll() is None  # takes the declaration
        assert one.client.unanswered == MAX_UNANSWERED
        assert isinstance(one.next(), Reopened)
        assert one.client.unanswered == 0
        assert one.answer(grant=1).counts.granted == 1


def test_a_lookup_that_was_on_the_way_is_asked_again(tmp_path: Path, talker: Talker) -> None:
    with service("cache_svc", folder=tmp_path) as process, executor(process.target, talker) as one:
        process.signal(signal.SIGKILL)
        wait_until(lambda: process.ended() is not None)
        wait_until(lambda: not one.client.connected)
        one.client.lookup([Chain(A, prompt(1).keys)])
        process.start()
        wait_until(lambda: process.listens() and process.serves())
        assert isinstance(one.next(), Reopened)
        wait_until(lambda: one.client.poll_hits() is not None)


def test_an_executor_that_says_nothing_learns_that_it_is_fenced(cache: ServiceProcess, talker: Talker) -> None:
    with executor(cache.target, talker, 1, "silent") as one:
        assert one.answer(grant=1).counts.granted == 1
        with executor(cache.target, talker, 2, "silent") as two:
            assert isinstance(one.next(), Fenced)
            assert two.answer(grant=2).counts.granted == 2


def test_a_higher_incarnation_fences(cache: ServiceProcess, talker: Talker) -> None:
    with executor(cache.target, talker, 1, "twice") as one, executor(cache.target, talker, 2, "twice") as two:
        one.client.send(Batch(0, grant=1))
        event = one.next()
        assert isinstance(event, Fenced)
        assert "incarnation 2" in event.reason
        assert not one.client.connected
        assert two.answer(grant=1).counts.granted == 1
        with pytest.raises(Conflict):
            Executor(cache.target, talker, 1, "twice")


def test_a_refused_batch_costs_a_reopening_and_no_more(cache: ServiceProcess, talker: Talker) -> None:
    with executor(cache.target, talker, name="clumsy") as one:
        one.answer(grant=1)
        one.client.send(Batch(0, releases=[Release(RequestId(0))]))
        assert isinstance(one.next(), Reopened)
        assert one.answer(grant=2).counts.granted == 2


def test_many_blocks_are_declared_in_parts(tmp_path: Path, talker: Talker) -> None:
    with service("cache_svc", folder=tmp_path) as process:
        pool = CachePool("large", 1, b"print", 5000, 1024, BLOCK_TOKENS)
        clock, state = MonotonicClock(), State()
        client = CacheClient(process.target, pool, clock)
        client.state = state
        talker.run(client.open())
        state.blocks = [DeclaredBlock(Block((3 << 32) | n), BlockState.GRANTED) for n in range(4999)]
        restart(process)
        while (event := client.poll()) is None:
            clock.wait(clock.now_us() + 1_000_000)
        assert isinstance(event, Reopened)
        assert (event.counts.granted, event.counts.free) == (4999, 1)
        talker.run(client.close())


class Slow(cache_pb2_grpc.CacheServicer):
    """A cache that does not answer the first look-up, and ends the first stream of batches when it is told to."""

    def __init__(self) -> None:
        self.looked_up = 0
        self.over = asyncio.Event()

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:
        return pb.OpenResponse(epoch=1, boot_id=bytes(16))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(boot_id=bytes(16))

    async def Apply(self, requests: Any, context: Any) -> Any:
        await self.over.wait()
        self.over.clear()
        answers: Sequence[pb.BatchAnswer] = ()
        for answer in answers:
            yield answer

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        self.looked_up += 1
        if self.looked_up == 1:
            await asyncio.Event().wait()
        return pb.LookupResponse(hits=[pb.ChainHits(device_blocks=2)])


def test_a_look_up_that_is_on_its_way_when_the_stream_breaks_is_asked_again(talker: Talker) -> None:
    async def serve() -> tuple[grpc.aio.Server, Slow, int]:
        server, slow = grpc.aio.server(), Slow()
        cache_pb2_grpc.add_CacheServicer_to_server(slow, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, slow, port

    server, slow, port = talker.run(serve())
    try:
        with executor(f"127.0.0.1:{port}", talker) as one:
            one.client.lookup([Chain(A, prompt(1, 2).keys)])
            wait_until(lambda: slow.looked_up == 1)
            talker.call(slow.over.set)
            wait_until(lambda: one.client.poll_hits() is not None)
    finally:
        talker.run(server.stop(0))
    assert slow.looked_up == 2


def test_an_absent_cache_is_an_error_in_time(talker: Talker) -> None:
    pool = CachePool("executor-0", 1, b"", 4, 1, BLOCK_TOKENS)
    client = CacheClient("127.0.0.1:9", pool, MonotonicClock())
    with pytest.raises(Away) as caught:
        talker.run(client.open(0.5))
    assert "127.0.0.1:9" in caught.value.message


def test_an_impossible_pool_is_an_error_at_once(cache: ServiceProcess, talker: Talker) -> None:
    client = CacheClient(cache.target, CachePool("executor-0", 1, b"", 0, 1, BLOCK_TOKENS), MonotonicClock())
    with pytest.raises(InvalidRequest):
        talker.run(client.open())


def test_what_it_opened(cache: ServiceProcess, talker: Talker) -> None:
    with executor(cache.target, talker, 12, "shown"), sync_channel(cache.target) as channel:
        stub: Any = cache_pb2_grpc.CacheStub(channel)
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=10)
        mine = next(each for each in status.executors if each.executor == "shown")
        assert (mine.incarnation, mine.counts.total, mine.redeclaring) == (12, 64, False)
