"""The executor's side of the cache: CachePort over gRPC.

The loop's thread calls `send`, `poll`, `lookup`; an asyncio loop on another thread does the talking. What crosses
over are two deques (unanswered batches one way, answers and events the other) and the declaration.

A broken stream is opened again, and what is unanswered is sent again: a batch that had been applied gets its first
answer. When the cache comes back with another boot id, its memory is gone: the client opens it again, `poll` takes
the declaration on the loop's thread, and once the cache has it, `poll` returns Reopened. Batches that were unanswered
when the declaration was taken are void. From the loss to Reopened, `unanswered` says MAX_UNANSWERED, so that the loop
sends nothing in between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from executor_svc.cache_pool import CachePool
from executor_svc.ports import CacheState, Clock, Fenced, Reopened
from jitney.block_ops import (
    Batch,
    BatchAnswer,
    Chain,
    ChainHits,
    DeclaredBlock,
    LowerTiers,
    Opened,
    RequestId,
    Segment,
)
from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache.v1 import cache_pb2_grpc
from jitney.cache_codec import decode_answer, decode_counts, decode_lower, encode_batch
from jitney.chain_codec import decode_hits, encode_chains, encode_declared
from jitney.errors import Aborted, Away, Conflict, Expired, JitneyError
from jitney.keys import Key
from jitney.serving import logs
from jitney.serving.channels import channel
from jitney.serving.status import from_rpc_error
from jitney.ticket_codec import decode_event, encode_call
from jitney.ticket_ops import TicketCall, TicketEvent

MAX_UNANSWERED = 8
NOBODY = RequestId(0)
_CALL_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 60.0
"""The first Open makes the CPU tier: its pages are touched. A declaration is as long as the pool is large."""
_DECLARED_A_MESSAGE = 2048
_BACKOFF_S = (0.02, 1.0)
_AWAY = (Away, Expired, Aborted)
"""What a cache may answer that still has its memory."""


class CacheClient:
    """CachePort. Set `state` before the loop's thread starts; `open` and `close` run on the asyncio loop."""

    def __init__(
        self,
        target: str,
        pool: CachePool,
        clock: Clock,
        state: CacheState | None = None,
        *,
        tls_ca: Path | None = None,
    ) -> None:
        self.state = state
        self._target = target
        self._tls_ca = tls_ca
        self._pool = pool
        self._clock = clock
        self._log = logs.get("cache_client")
        self._events: deque[BatchAnswer | Reopened | Fenced] = deque()
        self._outbox: deque[pb.Batch] = deque()  # unanswered; the first has the number _first_seq
        self._first_seq = 1
        self._written = 0  # of the outbox, on the stream that is open
        self._opened: Opened | None = None
        self._connected = False
        self._losses = 0  # how often the cache lost its memory; written by the asyncio side, as _told
        self._told = 0  # of these, how often it was told our blocks again
        self._reopenings = 0  # Reopened events that were polled; written by the loop's thread
        self._declaration: asyncio.Future[Sequence[DeclaredBlock]] | None = None
        self._chains: Sequence[Chain] | None = None
        self._hits: Sequence[tuple[Chain, ChainHits]] | None = None
        self._calls: deque[TicketCall] = deque()  # to tell on the tickets' stream
        self._orders: deque[TicketEvent] = deque()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def segments(self) -> Sequence[Segment]:
        """Of the CPU tier; empty if the cache has none."""
        return self._opened.segments if self._opened is not None else ()

    @property
    def lower(self) -> LowerTiers:
        """What was below the device when the cache was opened."""
        return self._opened.lower if self._opened is not None else LowerTiers()

    # The loop's thread.

    @property
    def connected(self) -> bool:
        """Whether the cache answers."""
        return self._connected

    @property
    def _knows_us(self) -> bool:
        """Whether the cache has our blocks, and `poll` has said so."""
        return self._losses == self._reopenings

    @property
    def unanswered(self) -> int:
        """Batches sent and not yet answered; MAX_UNANSWERED while the cache is being told our blocks."""
        return len(self._outbox) if self._knows_us else MAX_UNANSWERED

    def send(self, batch: Batch) -> None:
        """Sends; returns at once. ValueError for a batch that has numbers out of range."""
        self._outbox.append(encode_batch(batch, self._pool.executor))
        self._loop.call_soon_threadsafe(self._wake.set)

    def poll(self) -> BatchAnswer | Reopened | Fenced | None:
        """The next answer or event, in order, or None. Takes the declaration if one is wanted."""
        if self._events:
            event = self._events.popleft()
            if isinstance(event, Reopened):
                self._reopenings += 1
            return event
        if self._declaration is not None:
            assert self.state is not None, "the loop runs without having told the client its state"
            if self.state.storing:
                return None
            wanted, self._declaration = self._declaration, None
            declared = self.state.declare()
            self._outbox.clear()
            self._calls.clear()
            self._orders.clear()
            self._loop.call_soon_threadsafe(_resolve, wanted, declared)
        return None

    def tell(self, call: TicketCall) -> None:
        """See CachePort. Dropped while the cache has no tier to copy to, and while it is being told our blocks."""
        if self._knows_us and self.segments:
            self._calls.append(call)
            self._loop.call_soon_threadsafe(self._told_more.set)

    def poll_ticket(self) -> TicketEvent | None:
        """See CachePort. What a cache that was opened again says comes after its Reopened."""
        return self._orders.popleft() if self._orders and self._knows_us else None

    def lookup(self, chains: Sequence[Chain]) -> None:
        """Asks for hits; a newer call replaces an unanswered one. Asked again until the cache answers."""
        self._chains = chains
        self._loop.call_soon_threadsafe(self._asked.set)

    def poll_hits(self) -> Sequence[tuple[Chain, ChainHits]] | None:
        """The hits of the last lookup, once, when they are there."""
        hits, self._hits = self._hits, None
        return hits

    # The asyncio side.

    async def find(self, keys: Sequence[Key]) -> ChainHits:
        """How much of a chain there is, for somebody who asks. Away if the cache does not answer."""
        request = encode_chains(self._pool.executor, [Chain(NOBODY, keys)])
        return decode_hits(await self._call(self._stub.Lookup, request))[0]

    async def open(self, timeout_s: float = 30.0) -> None:
        """Opens the cache, and keeps it open from here on. Away if it does not answer in time, Conflict if a higher
        incarnation has it, InvalidRequest for an impossible pool."""
        self._loop = asyncio.get_running_loop()
        self._wake, self._asked, self._up = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._told_more = asyncio.Event()
        self._channel: grpc.aio.Channel = channel(self._target, tls_ca=self._tls_ca)
        self._stub: Any = cache_pb2_grpc.CacheStub(self._channel)
        try:
            async with asyncio.timeout(timeout_s):
                while self._opened is None:
                    with contextlib.suppress(*_AWAY):
                        self._opened = await self._open(redeclares=False)
                        break
                    await self._renew_channel()
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            await self._channel.close()
            raise Away(f"the cache at {self._target} does not answer within {timeout_s:g} s", field="cache") from error
        except JitneyError:
            await self._channel.close()
            raise
        self._tasks = [asyncio.create_task(self._stay_open()), asyncio.create_task(self._look_up())]

    async def close(self) -> None:
        """Ends all that runs here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _open(self, *, redeclares: bool) -> Opened:
        pool = self._pool
        request = pb.OpenRequest(
            executor=pool.executor,
            incarnation=pool.incarnation,
            fingerprint=pool.fingerprint,
            blocks=pool.blocks,
            block_bytes=pool.block_bytes,
            block_tokens=pool.block_tokens,
            redeclares=redeclares,
            lock_path=str(pool.lock_path or ""),
        )
        answer = await self._call(self._stub.Open, request, timeout_s=_OPEN_TIMEOUT_S)
        segments = [Segment(s.path, s.bytes, s.slots, s.slot_bytes) for s in answer.segments]
        return Opened(answer.epoch, answer.boot_id, segments, decode_lower(answer.lower))

    async def _stay_open(self) -> None:
        """One stream after the other, until a higher incarnation takes the name."""
        backoff_s, lost = _BACKOFF_S[0], False
        while True:
            try:
                if lost or not await self._is_same_boot():
                    await self._reopen()
                    lost = False
                self._set_connected(True)
                backoff_s = _BACKOFF_S[0]
                await self._stream()
            except _AWAY as error:
                self._log.warning("the cache is away", error=error.message)
            except JitneyError as error:
                if isinstance(error, Conflict) and error.field == "incarnation":
                    self._set_connected(False)
                    self._tell(Fenced(error.message))
                    return
                lost = True
                self._log.error("the cache has to be opened again", error=error.message, field=error.field)
            self._set_connected(False)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
            await self._renew_channel()

    async def _is_same_boot(self) -> bool:
        status = await self._call(self._stub.GetStatus, pb.GetStatusRequest())
        return self._opened is not None and bool(status.boot_id == self._opened.boot_id)

    async def _reopen(self) -> None:
        """Opens a cache that has lost its memory, and tells it every block that is not free."""
        if self._losses == self._told:
            self._losses += 1
        opened = await self._open(redeclares=True)
        wanted = self._declaration = self._loop.create_future()
        while not wanted.done():
            self._clock.ring()
            await asyncio.wait((wanted,), timeout=_BACKOFF_S[0])
        declared = wanted.result()

        async def messages() -> Any:
            for start in range(0, max(1, len(declared)), _DECLARED_A_MESSAGE):
                yield pb.Declaration(
                    executor=self._pool.executor,
                    epoch=opened.epoch,
                    boot_id=opened.boot_id,
                    blocks=encode_declared(declared[start : start + _DECLARED_A_MESSAGE]),
                    complete=start + _DECLARED_A_MESSAGE >= len(declared),
                )

        answer = await self._call(self._stub.Redeclare, messages(), timeout_s=_OPEN_TIMEOUT_S)
        self._opened, self._first_seq = opened, 1
        self._told += 1
        self._tell(Reopened(decode_counts(answer.counts), opened.segments, opened.lower))

    async def _stream(self) -> None:
        """Writes batches and reads answers until the stream breaks; raises what broke it."""
        self._written = 0
        call = self._stub.Apply()
        calls, tasks = [call], [asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))]
        readers = tasks[:1]
        if self.segments:
            tickets = self._stub.Tickets()
            calls.append(tickets)
            readers.append(asyncio.create_task(self._read_tickets(tickets)))
            tasks += [readers[1], asyncio.create_task(self._write_tickets(tickets))]
        try:
            done, _ = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
            for reader in done:
                reader.result()
            raise Away("the cache ended the stream")
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in calls:
                each.cancel()

    async def _read_tickets(self, call: Any) -> None:
        async for message in call:
            self._orders.append(decode_event(message))
            self._clock.ring()

    async def _write_tickets(self, call: Any) -> None:
        """A call that was written when the stream broke is said again: the cache asks by pushing what is open."""
        await call.write(self._signed(encode_call(None)))
        while True:
            self._told_more.clear()
            while self._calls:
                await call.write(self._signed(encode_call(self._calls.popleft())))
            await self._told_more.wait()

    def _signed(self, message: pb.TicketCall) -> pb.TicketCall:
        assert self._opened is not None
        message.executor = self._pool.executor
        message.epoch, message.boot_id = self._opened.epoch, self._opened.boot_id
        return message

    async def _read(self, call: Any) -> None:
        async for message in call:
            self._take(message)

    async def _write(self, call: Any) -> None:
        opened = self._opened
        assert opened is not None
        while True:
            self._wake.clear()
            while self._written < len(self._outbox):
                message = self._outbox[self._written]
                message.epoch, message.boot_id = opened.epoch, opened.boot_id
                message.op_seq = self._first_seq + self._written
                self._written += 1
                await call.write(message)
            await self._wake.wait()

    def _take(self, message: pb.BatchAnswer) -> None:
        if message.op_seq != self._first_seq or not self._written:
            raise Conflict(
                f"the cache answered batch {message.op_seq}, awaited was {self._first_seq}",
                field="op_seq",
                limit=self._first_seq,
                value=message.op_seq,
            )
        answer = decode_answer(message)
        self._outbox.popleft()
        self._first_seq += 1
        self._written -= 1
        self._tell(answer)

    async def _look_up(self) -> None:
        while True:
            await self._asked.wait()
            await self._up.wait()
            self._asked.clear()
            if (chains := self._chains) is None:
                continue
            try:
                answer = await self._call(self._stub.Lookup, encode_chains(self._pool.executor, chains))
            except JitneyError as error:
                self._log.debug("look-up failed", error=error.message)
                self._asked.set()
                await asyncio.sleep(_BACKOFF_S[0])
                continue
            if self._chains is chains:
                self._chains = None
                self._hits = list(zip(chains, decode_hits(answer), strict=True))
                self._clock.ring()

    async def _call(self, method: Any, request: Any, *, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise Away("the channel was given up meanwhile", field="cache") from None

    async def _renew_channel(self) -> None:
        """A channel that has failed would wait before it tries again. Calls on it end with Away."""
        old = self._channel
        self._channel = channel(self._target, tls_ca=self._tls_ca)
        self._stub = cache_pb2_grpc.CacheStub(self._channel)
        await old.close()

    def _set_connected(self, connected: bool) -> None:
        if connected != self._connected:
            self._connected = connected
            (self._up.set if connected else self._up.clear)()
            self._clock.ring()

    def _tell(self, event: BatchAnswer | Reopened | Fenced) -> None:
        self._events.append(event)
        self._clock.ring()


def _resolve(future: asyncio.Future[Sequence[DeclaredBlock]], declared: Sequence[DeclaredBlock]) -> None:
    if not future.done():
        future.set_result(declared)
