"""The scheduler behind its port: one stream to one replica, and to the next one when that fails.

The loop's thread encodes and polls; everything else happens on an asyncio loop of another thread. One snapshot is
outstanding at a time. A replica that breaks, is late or refuses a snapshot loses the stream to the next one, which is
asked the same snapshot with `attempt` one higher; when all have refused it, a newer snapshot is waited for, and when
none can be reached, all are tried again, after a pause that doubles. Every decision is checked against the digest of
the bytes that it answers, and one that cannot be obeyed counts as a refusal: no scheduler can take the executor down.

A learned table goes along until a snapshot with it has been answered, from then on only its digest; a replica that
does not hold it says so and is asked again with all of it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc.aio
import numpy as np

from executor_svc.ports import Clock
from jitney.columns import I64
from jitney.decision import Decision
from jitney.decision_checks import check
from jitney.errors import Away, Conflict, InvalidRequest, JitneyError
from jitney.scheduler_codec import decode_decision, digest_of, encode_snapshot, with_attempt, with_tables
from jitney.serving import logs
from jitney.serving.channels import channel
from jitney.serving.status import from_rpc_error
from jitney.snapshot import Settings, Snapshot

DECIDE: Final = "/jitney.scheduler.v1.Scheduler/Decide"
KEPT_ROUND_TRIPS: Final = 4096
HAND_OVER_S: Final = 0.0005
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A snapshot that the loop wants decided."""

    data: bytes
    incarnation: int
    step: int
    attempt: int
    settings: Settings
    asked_ns: int
    named: frozenset[bytes]  # digests of the policy's tables
    tables: Mapping[bytes, bytes]  # content by digest of those that `data` only names


class SchedulerClient:
    """SchedulerPort over gRPC. `addresses` are host:port, one a replica; `loop` runs in another thread.

    `timeout_s` is how long one replica has for one snapshot. `rotate` sends every snapshot to another replica than
    the one before, which shows that any of them decides alike.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float = 1.0,
        rotate: bool = False,
        tls_ca: Path | None = None,
        record: Callable[[bytes, bytes, int], None] | None = None,
    ) -> None:
        """`record` is given every snapshot that was answered, the decision, and the round trip in microseconds; on
        the asyncio loop, so it must not block."""
        if not addresses:
            raise InvalidRequest("a scheduler's address is needed", field="schedulers", limit="at least 1", value=0)
        self._clock, self._loop = clock, loop
        self._replicas = [_Replica(address, timeout_s, tls_ca) for address in addresses]
        self._rotate = rotate
        self._record = record
        self._current = 0
        self._wake = asyncio.Event()
        self._handed = threading.Event()  # the last question is on its way
        self._wanted: _Question | None = None
        self._settled: _Question | None = None  # the last one that was answered, or refused by all
        self._shown: frozenset[bytes] = frozenset()  # digests of the tables of the last snapshot that was answered
        self._answers: deque[tuple[_Question, Decision]] = deque(maxlen=1)
        self._round_trips_us: I64 = np.zeros(KEPT_ROUND_TRIPS, np.int64)
        self._log = logs.get("scheduler")
        self._task: concurrent.futures.Future[None] | None = None
        self.connected = False
        self.answered = 0
        self.failovers = 0
        self.last_error: JitneyError | None = None

    def start(self) -> None:
        """Connects in the background; from any thread."""
        self._task = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    async def close(self) -> None:
        """Ends the stream; on the asyncio loop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wrap_future(self._task)
            self._task = None

    def ask(self, snapshot: Snapshot) -> None:
        """Sends; a newer snapshot replaces an unanswered one. On the loop's thread, as `poll` is."""
        asked_ns = time.perf_counter_ns()
        named = frozenset(table.digest for table in snapshot.policy.tables)
        tables = {t.digest: t.content for t in snapshot.policy.tables if t.content} if named == self._shown else {}
        data = encode_snapshot(_naming_tables(snapshot) if tables else snapshot)
        self._wanted = _Question(
            data,
            snapshot.incarnation,
            snapshot.step,
            snapshot.attempt,
            snapshot.settings,
            asked_ns,
            named,
            tables,
        )
        with contextlib.suppress(RuntimeError):  # the asyncio loop is closed: nobody will answer
            self._handed.clear()
            self._loop.call_soon_threadsafe(self._wake.set)
            self._handed.wait(HAND_OVER_S)  # lets the other thread write at once: it needs the interpreter for it

    def poll(self) -> Decision | None:
        """The decision for the last snapshot, once."""
        try:
            question, decision = self._answers.popleft()
        except IndexError:
            return None
        return decision if question is self._wanted else None

    def round_trips_us(self) -> I64:
        """The latest round trips, from `ask` to the decoded decision, in no order; at most KEPT_ROUND_TRIPS."""
        return self._round_trips_us[: min(self.answered, KEPT_ROUND_TRIPS)].copy()

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                question = self._wanted
                if question is not None and question is not self._settled:
                    await self._settle(question)
                elif not self._replicas[self._current].open:
                    await self._connect()
                else:
                    await self._wake.wait()
        finally:
            self.connected = False
            for replica in self._replicas:
                await replica.close()

    async def _settle(self, question: _Question) -> None:
        """Asks one replica after another, until one has answered or a newer question is there."""
        if self._rotate:
            self._current = (self._current + 1) % len(self._replicas)
        base, attempt, failed, refused, pause_s = question.data, question.attempt, 0, 0, FIRST_PAUSE_S
        data = base
        while question is self._wanted:
            try:
                answer, decision = await self._replicas[self._current].ask(data, self._wake, self._handed)
                _check_answer(decision, question, data)
            except JitneyError as error:
                attempt += 1
                if isinstance(error, Conflict) and question.tables and base is question.data:
                    base = with_tables(base, question.tables)
                    data = with_attempt(base, attempt)
                    continue
                failed += 1
                refused = refused + 1 if isinstance(error, InvalidRequest) else 0
                self._next_replica(error, question.step)
                if refused >= len(self._replicas):
                    self._settled = question
                    return
                data = with_attempt(base, attempt)
                if failed % len(self._replicas) == 0:
                    pause_s = await self._pause(pause_s)
                continue
            round_trip_us = self._deliver(question, decision)
            if self._record is not None:
                self._record(data, answer, round_trip_us)
            return

    async def _connect(self) -> None:
        """Opens a stream to one replica after another, until one is there or a question is."""
        pause_s, tried = FIRST_PAUSE_S, 0
        self.connected = False
        while self._wanted is self._settled:
            try:
                await self._replicas[self._current].connect(self._wake)
            except JitneyError as error:
                self._next_replica(error, step=0)
                tried += 1
                if tried % len(self._replicas) == 0:
                    pause_s = await self._pause(pause_s)
                continue
            self.connected = True
            self._clock.ring()
            return

    async def _pause(self, pause_s: float) -> float:
        """All replicas have failed: waits, and returns how long to wait the next time."""
        self.connected = False
        await asyncio.sleep(pause_s)
        return min(2 * pause_s, LONGEST_PAUSE_S)

    def _next_replica(self, error: JitneyError, step: int) -> None:
        replica = self._replicas[self._current]
        if replica.answers:
            self._log.warning("scheduler replica fails", address=replica.address, step=step, error=error.message)
        replica.answers = False
        self.last_error = error
        self.failovers += 1
        self._current = (self._current + 1) % len(self._replicas)

    def _deliver(self, question: _Question, decision: Decision) -> int:
        self._settled = question
        self._shown = question.named
        took_us = (time.perf_counter_ns() - question.asked_ns) // 1000
        self._round_trips_us[self.answered % KEPT_ROUND_TRIPS] = took_us
        self.answered += 1
        self.connected = True
        self.last_error = None
        self._replicas[self._current].answers = True
        self._answers.append((question, decision))
        self._clock.ring()
        return took_us


class _Replica:
    """One address and the stream to it, which rings a bell when it ends."""

    def __init__(self, address: str, timeout_s: float, tls_ca: Path | None) -> None:
        self.address = address
        self.answers = True  # as far as is known: each time that it stops to is logged once
        self._timeout_s = timeout_s
        self._tls_ca = tls_ca
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None

    @property
    def open(self) -> bool:
        """Whether there is a stream that has not ended."""
        return self._call is not None and not self._call.done()

    async def connect(self, bell: asyncio.Event) -> None:
        """Opens a stream. JitneyError if the replica does not answer in time."""
        await self._within(self._open(bell))

    async def ask(self, data: bytes, bell: asyncio.Event, handed: threading.Event) -> tuple[bytes, Decision]:
        """The decision for a serialised snapshot, as it came and read. JitneyError, and the stream is gone, if there is
        none in time."""
        return await self._within(self._ask(data, bell, handed))

    async def close(self) -> None:
        """Ends stream and connection."""
        self._drop()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _within(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            self._drop()
            raise Away(f"{self.address} has not answered within {self._timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            self._drop()
            raise from_rpc_error(error) from None
        except asyncio.InvalidStateError:  # the call ended while it was written to
            self._drop()
            raise Away(f"{self.address} ended the stream") from None
        except JitneyError:
            self._drop()
            raise

    async def _open(self, bell: asyncio.Event) -> None:
        if self.open:
            return
        if self._channel is None:
            self._channel = channel(self.address, tls_ca=self._tls_ca)
        call: Any = self._channel.stream_stream(DECIDE)()
        self._call = call
        call.add_done_callback(lambda _: bell.set())
        await call.wait_for_connection()

    async def _ask(self, data: bytes, bell: asyncio.Event, handed: threading.Event) -> tuple[bytes, Decision]:
        await self._open(bell)
        call = self._call
        asyncio.get_running_loop().call_soon(handed.set)
        await call.write(data)
        answer = await call.read()
        if answer is grpc.aio.EOF:
            raise Away(f"{self.address} ended the stream")
        return answer, decode_decision(answer)

    def _drop(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


def _naming_tables(snapshot: Snapshot) -> Snapshot:
    """The snapshot with its tables' digests alone."""
    tables = tuple(replace(table, content=b"") for table in snapshot.policy.tables)
    return replace(snapshot, policy=replace(snapshot.policy, tables=tables))


def _check_answer(decision: Decision, question: _Question, data: bytes) -> None:
    told = (decision.incarnation, decision.step, decision.snapshot_digest)
    asked = (question.incarnation, question.step, digest_of(data))
    if told != asked:
        raise Away(f"a decision for step {decision.step} came, step {question.step} was asked")
    check(decision, question.settings)
