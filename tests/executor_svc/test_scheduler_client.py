"""The executor's way to its schedulers: real replicas that are killed, and scripted ones that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from executor_svc.scheduler_client import SchedulerClient
from jitney.columns import PolicyColumnUpdates
from jitney.decision import Decision
from jitney.errors import Away, InvalidRequest
from jitney.scheduler_codec import decode_decision, decode_snapshot, digest_of, encode_decision, encode_snapshot
from jitney.snapshot import PolicyChoice, PolicyTable, Settings, Snapshot
from scheduler_svc.lengths.trees import LengthTable, Trees, write_table
from tests.support.scheduler_process import SchedulerProcess
from tests.support.situations import random_snapshot

STUMP = Trees(1, 0, np.array([0]), np.array([0]), np.array([1, 2]))


class Bell:
    """A clock whose bell is an event."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wait(self, until_us: int | None) -> None:
        self._rung.wait(None if until_us is None else max(0, until_us - self.now_us()) / 1e6)
        self._rung.clear()

    def ring(self) -> None:
        self._rung.set()


@dataclass
class Desk:
    """A client on an asyncio loop of its own thread."""

    loop: asyncio.AbstractEventLoop
    bell: Bell = field(default_factory=Bell)

    def client(self, addresses: list[str], **options: Any) -> SchedulerClient:
        client = SchedulerClient(addresses, self.bell, self.loop, **options)
        client.start()
        return client

    def until(self, done: Callable[[], Any]) -> Any:
        end = time.monotonic() + 60
        while not (found := done()):
            assert time.monotonic() < end, "nothing came"
            self.bell.wait(self.bell.now_us() + 50_000)
        return found

    def decided(self, client: SchedulerClient, snapshot: Snapshot) -> Decision:
        client.ask(snapshot)
        decision: Decision = self.until(client.poll)
        assert client.poll() is None
        return decision

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


@pytest.fixture
def desk() -> Iterator[Desk]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Desk(loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def two() -> Iterator[list[SchedulerProcess]]:
    with SchedulerProcess() as one, SchedulerProcess() as other:
        yield [one, other]


def test_replicas_decide_byte_equal_and_every_step_may_go_to_another(desk: Desk, two: list[SchedulerProcess]) -> None:
    rotating = desk.client([replica.address for replica in two], rotate=True)
    single = desk.client([two[0].address])
    for step in range(60):
        rand = random.Random(step)
        snapshot = replace(random_snapshot(rand, rand.randint(0, 8), rand.randint(0, 20)), step=step)
        assert encode_decision(desk.decided(rotating, snapshot)) == encode_decision(desk.decided(single, snapshot))
    assert rotating.answered == 60 == len(rotating.round_trips_us()) and rotating.failovers == 0
    assert rotating.round_trips_us().min() > 0 and rotating.connected and rotating.last_error is None
    desk.run(rotating.close())
    desk.run(single.close())
    assert not rotating.connected
    assert "stream opened" in two[1].log()


def test_kill_9_goes_to_the_next_replica_and_comes_back(desk: Desk) -> None:
    with SchedulerProcess() as first, SchedulerProcess() as second:
        client = desk.client([first.address, second.address])
        desk.until(lambda: client.connected)
        snapshot = random_snapshot(random.Random(1), 5, 5)
        before = desk.decided(client, replace(snapshot, step=1, attempt=0))
        first.kill()
        after = desk.decided(client, replace(snapshot, step=2, attempt=0))
        assert (before.attempt, after.step) == (0, 2)
        assert encode_decision(
            replace(after, step=1, attempt=0, snapshot_digest=before.snapshot_digest)
        ) == encode_decision(before)
        second.kill()
        client.ask(replace(snapshot, step=3))
        desk.until(lambda: not client.connected and isinstance(client.last_error, Away))
        assert client.poll() is None
        with SchedulerProcess(port=first.port):
            decision = desk.until(client.poll)
            assert decision.step == 3 and decision.attempt > 0 and client.connected
        desk.run(client.close())


def test_a_replica_that_dies_while_idle_is_left_before_the_next_snapshot(desk: Desk) -> None:
    with SchedulerProcess() as first, SchedulerProcess() as second:
        client = desk.client([first.address, second.address])
        desk.until(lambda: client.connected)
        first.kill()
        desk.until(lambda: client.failovers > 0 and client.connected)
        assert desk.decided(client, Snapshot(step=4, attempt=0)).attempt == 0
        desk.run(client.close())


Behaviour = Callable[[bytes, int], Awaitable[bytes]]


async def decides(data: bytes, _: int) -> bytes:
    snapshot = decode_snapshot(data)
    return encode_decision(
        Decision(
            incarnation=snapshot.incarnation,
            step=snapshot.step,
            attempt=snapshot.attempt,
            snapshot_digest=snapshot.digest,
            needed_blocks=7,
        )
    )


@contextlib.asynccontextmanager
async def scripted(behaviour: Behaviour) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A replica that answers as told; gives its address and what it was asked."""
    asked: list[bytes] = []

    async def decide(requests: AsyncIterator[bytes], context: Any) -> None:
        await context.send_initial_metadata(())
        async for data in requests:
            asked.append(data)
            try:
                await context.write(await behaviour(data, len(asked)))
            except InvalidRequest as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)

    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(decide)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("jitney.scheduler.v1.Scheduler", {"Decide": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", asked
    finally:
        await server.stop(None)


@contextlib.contextmanager
def replicas(desk: Desk, *behaviours: Behaviour) -> Iterator[tuple[list[str], list[list[bytes]]]]:
    """Scripted replicas on the desk's loop."""
    stack = contextlib.AsyncExitStack()

    async def enter() -> list[tuple[str, list[bytes]]]:
        return [await stack.enter_async_context(scripted(behaviour)) for behaviour in behaviours]

    entered = desk.run(enter())
    try:
        yield [address for address, _ in entered], [asked for _, asked in entered]
    finally:
        desk.run(stack.aclose())


def test_a_table_goes_along_once_and_again_to_who_lacks_it(desk: Desk) -> None:
    """Two replicas that take turns: each is sent the table when it says that it has not got it."""
    content = write_table(LengthTable(STUMP, STUMP))
    table = PolicyTable("lengths", digest_of(content), content)
    recorded: list[tuple[int, bytes]] = []

    def record(data: bytes, _: bytes, __: int) -> None:
        shown = decode_snapshot(data)
        recorded.append((shown.attempt, shown.policy.tables[0].content))

    with SchedulerProcess() as one, SchedulerProcess() as other:
        client = desk.client([one.address, other.address], rotate=True, record=record)
        for step in range(1, 6):
            choice = PolicyChoice("sjf", tables=(table,))
            decision = desk.decided(client, Snapshot(incarnation=1, step=step, policy=choice))
            assert decision.step == step
        desk.run(client.close())
    assert recorded == [(0, content), (1, content), (0, b""), (0, b""), (0, b"")]
    assert client.failovers == 0


async def refuses(_: bytes, __: int) -> bytes:
    raise InvalidRequest("no such policy")


async def sleeps(_: bytes, __: int) -> bytes:
    await asyncio.sleep(3600)
    return b""


async def lies(data: bytes, number: int) -> bytes:
    return await decides(encode_snapshot(replace(decode_snapshot(data), now_us=1)), number)


async def stammers(_: bytes, __: int) -> bytes:
    return b"\xff\xff"


async def raves(data: bytes, number: int) -> bytes:
    """Updates of policy columns without their values."""
    sane = decode_decision(await decides(data, number))
    return encode_decision(replace(sane, policy_updates=PolicyColumnUpdates(np.array([3], np.uint64))))


@pytest.mark.parametrize("bad", [refuses, sleeps, lies, stammers, raves])
def test_the_next_replica_gets_the_same_snapshot_one_attempt_later(desk: Desk, bad: Behaviour) -> None:
    with replicas(desk, bad, decides) as (addresses, asked):
        client = desk.client(addresses, timeout_s=0.5)
        decision = desk.decided(client, Snapshot(step=5, attempt=2, now_us=77))
        assert (decision.step, decision.attempt, decision.needed_blocks) == (5, 3, 7)
        first, second = decode_snapshot(asked[0][0]), decode_snapshot(asked[1][0])
        assert encode_snapshot(replace(first, attempt=3)) == encode_snapshot(second)
        assert client.failovers == 1 and client.connected
        assert desk.decided(client, Snapshot(step=6)).attempt == 0  # it stays with the one that answers
        desk.run(client.close())


def test_when_all_refuse_a_newer_snapshot_is_waited_for(desk: Desk) -> None:
    with replicas(desk, refuses, refuses) as (addresses, asked):
        client = desk.client(addresses)
        client.ask(Snapshot(step=1))
        desk.until(lambda: isinstance(client.last_error, InvalidRequest) and len(asked[1]) == 1)
        time.sleep(0.3)
        assert (len(asked[0]), len(asked[1])) == (1, 1) and client.poll() is None
        client.ask(Snapshot(step=2))
        desk.until(lambda: len(asked[0]) == len(asked[1]) == 2)
        desk.run(client.close())


def test_a_newer_snapshot_replaces_an_unanswered_one(desk: Desk) -> None:
    release = asyncio.Event()

    async def slow(data: bytes, number: int) -> bytes:
        if number == 1:
            await release.wait()
        return await decides(data, number)

    with replicas(desk, slow) as (addresses, asked):
        client = desk.client(addresses, timeout_s=30)
        client.ask(Snapshot(step=1))
        desk.until(lambda: asked[0])
        for step in range(2, 50):
            client.ask(Snapshot(step=step))
        desk.loop.call_soon_threadsafe(release.set)
        assert desk.until(client.poll).step == 49
        assert len(asked[0]) == 2  # one was outstanding, and only the newest followed
        desk.run(client.close())


def test_nobody_there(desk: Desk) -> None:
    client = desk.client(["127.0.0.1:1"])
    client.ask(Snapshot(settings=Settings()))
    desk.until(lambda: isinstance(client.last_error, Away))
    assert not client.connected and client.poll() is None
    desk.run(client.close())
    with pytest.raises(InvalidRequest):
        desk.client([])


def test_asking_never_waits(desk: Desk) -> None:
    """With the asyncio loop itself held up, and after it is gone."""
    client = desk.client(["127.0.0.1:1"])
    held = threading.Event()
    desk.loop.call_soon_threadsafe(held.wait)
    for step in range(100):
        client.ask(Snapshot(step=step))
        assert client.poll() is None
    held.set()
    desk.run(client.close())
