"""The cache over gRPC: a thin shell around `Epochs` and `Ledger`. Everything runs on one event loop, call by call.

`Apply` answers batches in the order in which they come; the client may have several on the way. A stream that breaks
is simply opened again: the client sends from the first unanswered batch on, and a batch that had been applied gets
its first answer again. Errors end the stream, and leave the ledger as it was before the batch that they name.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import AsyncIterator
from typing import Any

from cache_svc.audit import audit
from cache_svc.config import CacheConfig
from cache_svc.epochs import DevicePool, Epochs, Session
from cache_svc.invalidate import What, invalidate
from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache.v1 import cache_pb2_grpc
from jitney.cache_codec import (
    decode_batch,
    encode_answer,
    encode_counts,
)
from jitney.chain_codec import decode_chains, decode_declared, encode_hits
from jitney.errors import InvalidRequest, Missing
from jitney.serving import logs, tracing
from jitney.serving.server import build_server, serve_until_signal
from jitney.ticket_codec import decode_call
from jitney.ticket_ops import AbortTicket, LoadDone, StoreDone

SERVICE = "jitney.cache.v1.Cache"
MAX_CHAINS = 64
CLOCK_LEEWAY_US = 60_000_000


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """The calls of the service. JitneyErrors are mapped to status codes by the server's interceptor."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._streams: dict[str, dict[asyncio.Task[Any], int]] = {}  # by executor: its Apply streams and their epochs
        self._log = logs.get("cache")
        self._build = _build()

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:
        """Begins an epoch of an executor. An incarnation that cannot have begun yet would fence its name for good."""
        newest = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000 + CLOCK_LEEWAY_US
        if request.incarnation > newest:
            what = f"incarnation {request.incarnation} lies ahead of this machine's boot clock, {newest} us"
            raise InvalidRequest(what, field="incarnation", limit=newest, value=request.incarnation)
        pool = DevicePool(
            request.executor,
            request.incarnation,
            request.fingerprint,
            request.blocks,
            request.block_bytes,
            request.block_tokens,
        )
        opened = self._epochs.open(pool, redeclares=request.redeclares)
        for stream, epoch in self._streams.get(pool.executor, {}).items():
            if epoch < opened.epoch:
                stream.cancel()  # also one that says nothing learns that it is fenced
        self._log.info("opened", executor=pool.executor, incarnation=pool.incarnation, epoch=opened.epoch)
        return pb.OpenResponse(epoch=opened.epoch, boot_id=opened.boot_id)

    async def Redeclare(self, requests: AsyncIterator[pb.Declaration], context: Any) -> pb.RedeclareResponse:
        """Takes a declaration; it counts once it is complete, and as a whole."""
        declared: list[pb.DeclaredBlock] = []
        async for message in requests:
            session = self._session(message)
            declared.extend(message.blocks)
            if (count := len(declared)) > (most := session.pool.blocks):
                what = f"{count} blocks are declared of a pool of {most}"
                raise InvalidRequest(what, field="blocks", limit=most, value=count)
            if message.complete:
                session.redeclare(decode_declared(declared))
                self._log.info("redeclared", executor=message.executor, epoch=message.epoch, blocks=len(declared))
                counts = encode_counts(session.ledger.blocks.counts())
                return pb.RedeclareResponse(blocks=len(declared), counts=counts)
        raise InvalidRequest("the declaration ended without `complete`", field="complete", value=False)

    async def Apply(self, requests: AsyncIterator[pb.Batch], context: Any) -> AsyncIterator[pb.BatchAnswer]:
        """Answers batch after batch, until the stream ends or a later Open fences it."""
        stream, name = asyncio.current_task(), ""
        assert stream is not None
        try:
            async for message in requests:
                session = self._session(message)
                name = message.executor
                self._streams.setdefault(name, {})[stream] = session.epoch
                yield self._applied(message, session)
        except asyncio.CancelledError:
            epoch = self._streams.get(name, {}).get(stream)
            if epoch is not None and epoch < self._epochs.of(name).epoch:
                stream.uncancel()
                self._epochs.session(name, epoch, self._epochs.boot_id)  # says who fenced it
            raise
        finally:
            streams = self._streams.get(name, {})
            streams.pop(stream, None)
            if not streams:
                self._streams.pop(name, None)

    def _applied(self, message: pb.Batch, session: Session) -> pb.BatchAnswer:
        with tracing.step("apply", message.executor, session.pool.incarnation, message.step):
            began = time.perf_counter_ns()
            answer = session.apply(decode_batch(message))
            apply_us = (time.perf_counter_ns() - began) // 1000
            return encode_answer(answer, epoch=session.epoch, boot_id=self._epochs.boot_id, apply_us=apply_us)

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        """Hits of chains on the device; there are no tiers below yet, so that theirs are 0."""
        if len(request.chains) > MAX_CHAINS:
            count = len(request.chains)
            raise InvalidRequest(
                f"{count} chains, the limit is {MAX_CHAINS}", field="chains", limit=MAX_CHAINS, value=count
            )
        ledger = self._epochs.of(request.executor).ledger
        return encode_hits([ledger.lookup(chain) for chain in decode_chains(request)])

    async def Tickets(self, requests: AsyncIterator[pb.TicketCall], context: Any) -> AsyncIterator[pb.TicketEvent]:
        """There is no tier below the device: no ticket was ever given, and nothing can be prefetched."""
        async for message in requests:
            self._session(message)
            call = decode_call(message)
            if isinstance(call, StoreDone | LoadDone | AbortTicket):
                raise Missing(f"ticket {call.ticket} was never given", field="ticket", value=call.ticket)
        nothing: tuple[pb.TicketEvent, ...] = ()
        for event in nothing:
            yield event

    async def Invalidate(self, request: pb.InvalidateRequest, context: Any) -> pb.InvalidateResponse:
        """See `invalidate`."""
        kind = request.WhichOneof("what")
        if kind is None or not getattr(request, kind):
            raise InvalidRequest("name a prefix key, tenant, salt digest or model version", field="what")
        ledgers = [session.ledger for session in self._epochs.sessions.values()]
        gone = invalidate(ledgers, (), What(**{kind: getattr(request, kind)}))
        self._log.info("invalidated", what=kind, device_blocks=gone.device)
        return pb.InvalidateResponse(device_blocks=gone.device)

    async def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditResponse:
        """Checks every ledger against itself."""
        findings: list[str] = []
        for name, session in self._epochs.sessions.items():
            findings += [f"{name}: {finding}" for finding in audit(session.ledger)]
        checked = sum(session.pool.blocks for session in self._epochs.sessions.values())
        return pb.AuditResponse(ok=not findings, findings=findings, checked_blocks=checked)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """What is open, and what it came to."""
        response = pb.GetStatusResponse(boot_id=self._epochs.boot_id, build=self._build)
        for name, session in self._epochs.sessions.items():
            ledger = session.ledger
            response.executors.add(
                executor=name,
                incarnation=session.pool.incarnation,
                epoch=session.epoch,
                counts=encode_counts(ledger.blocks.counts()),
                op_seq=session.op_seq,
                redeclaring=session.redeclaring,
                requests=len(ledger.requests),
            )
            response.hit_tokens += ledger.hit_blocks * session.pool.block_tokens
            response.missed_tokens += ledger.missed_blocks * session.pool.block_tokens
            response.evictions += ledger.blocks.evicted
        return response

    async def audit_when_idle(self, idle_s: float) -> None:
        """Audits each ledger that has changed, once no batch has come for `idle_s`. Runs until it is cancelled."""
        clean: dict[str, tuple[int, int]] = {}
        seen: dict[str, tuple[int, int]] = {}
        while True:
            await asyncio.sleep(idle_s)
            for name, session in self._epochs.sessions.items():
                mark = (session.epoch, session.op_seq)
                if seen.get(name) == mark != clean.get(name):
                    for finding in audit(session.ledger):
                        self._log.error("audit", executor=name, finding=finding)
                    clean[name] = mark
                seen[name] = mark

    def _session(self, message: pb.Declaration | pb.Batch | pb.TicketCall) -> Session:
        return self._epochs.session(message.executor, message.epoch, message.boot_id)


def _build() -> str:
    try:
        return importlib.metadata.version("jitney")
    except importlib.metadata.PackageNotFoundError:
        return "source"


async def serve(config: CacheConfig, boot_id: bytes) -> int:
    """Serves until a signal; returns the exit status. `boot_id` is 16 bytes, new at every start."""
    server = build_server(config, "cache")
    servicer = CacheServicer(Epochs(boot_id))
    cache_pb2_grpc.add_CacheServicer_to_server(servicer, server.grpc)
    server.offer(SERVICE)
    idle = None
    if config.audit_idle_s > 0:
        idle = asyncio.create_task(servicer.audit_when_idle(config.audit_idle_s))
    try:
        return await serve_until_signal(server)
    finally:
        if idle is not None:
            idle.cancel()
