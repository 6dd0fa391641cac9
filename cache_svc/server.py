"""The cache over gRPC: a thin shell around `Epochs`, `Ledger` and the lower tiers. All on one event loop.

`Apply` answers batches in the order in which they come; the client may have several on the way. A stream that breaks
is simply opened again: the client sends from the first unanswered batch on, and a batch that had been applied gets
its first answer again. Errors end the stream, and leave the ledger as it was before the batch that they name.

`Tickets` pushes what the lower tiers want copied or have ready, and hears what became of it; who opens it anew is told
all that is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache_svc.audit import audit
from cache_svc.config import CacheConfig
from cache_svc.cost_order import ORDERS
from cache_svc.disk_calls import DiskCalls
from cache_svc.disk_jobs import DiskEntry
from cache_svc.epochs import DevicePool, Epochs, Session, plain_index
from cache_svc.invalidate import What, invalidate
from cache_svc.kv_events import Feed
from cache_svc.liveness import held_lock
from cache_svc.status import status
from cache_svc.ticket_streams import Queue
from cache_svc.tier_audit import audit_tiers
from cache_svc.tier_host import TierHost, TierSettings
from cache_svc.tiers import Owner, TierLimits, Tiers
from jitney.block_ops import LowerTiers
from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache.v1 import cache_pb2_grpc
from jitney.cache_codec import (
    decode_batch,
    encode_answer,
    encode_counts,
    encode_lower,
)
from jitney.chain_codec import decode_chains, decode_declared, encode_hits
from jitney.errors import InvalidRequest, JitneyError
from jitney.keys import Key
from jitney.serving import logs, tracing
from jitney.serving.server import build_server, serve_until_signal
from jitney.ticket_codec import decode_call, encode_event

if TYPE_CHECKING:
    from cache_svc.kv_events_publisher import EventPublisher

SERVICE = "jitney.cache.v1.Cache"
MAX_CHAINS = 64
CLOCK_LEEWAY_US = 60_000_000

SetServing = Callable[[str], Awaitable[None]]


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """The calls of the service. JitneyErrors are mapped to status codes by the server's interceptor."""

    def __init__(self, epochs: Epochs, host: TierHost) -> None:
        self._epochs = epochs
        self._host = host
        self._streams: dict[str, dict[asyncio.Task[Any], int]] = {}  # by executor: its Apply streams and their epochs
        self._log = logs.get("cache")
        self._unsound = ""
        self._forgotten: list[What] = []  # while the SSD is scanned
        self._unwanted: set[Key] = set()  # what the scan found of it
        host.unwanted = self._is_forgotten

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
        tiers, lock = await self._below(pool, request.lock_path)
        self._host.touch()
        try:
            before = self._epochs.sessions.get(pool.executor)
            opened = self._epochs.open(pool, redeclares=request.redeclares, tiers=tiers)
        except JitneyError:
            if lock is not None:
                os.close(lock)
            raise
        if before is not None:
            self._end_streams(before)
            self._host.fenced(before.owner)
        if lock is not None:
            self._host.watch.add((pool.executor, opened.epoch), lock)
        self._log.info("opened", executor=pool.executor, incarnation=pool.incarnation, epoch=opened.epoch)
        segments = self._host.segments if tiers is not None else ()
        lower = self._host.with_rates(LowerTiers(*tiers.room())) if tiers is not None else LowerTiers()
        return pb.OpenResponse(
            epoch=opened.epoch,
            boot_id=opened.boot_id,
            segments=[
                pb.Segment(path=each.path, bytes=each.bytes, slots=each.slots, slot_bytes=each.slot_bytes)
                for each in segments
            ],
            lower=encode_lower(lower),
        )

    async def _below(self, pool: DevicePool, lock_path: str) -> tuple[Tiers | None, int | None]:
        """The tiers for this executor, and the lock that says whether its process lives; without one it gets none."""
        if not lock_path:
            return None, None
        try:
            lock = held_lock(Path(lock_path))
        except InvalidRequest as error:
            self._log.warning("no tiers for this executor", executor=pool.executor, error=error.message)
            return None, None
        tiers = None
        try:
            tiers = await self._host.fit(pool.block_bytes, pool.block_tokens)
        finally:
            if tiers is None:
                os.close(lock)
        return tiers, lock if tiers is not None else None

    def _end_streams(self, fenced: Session) -> None:
        """Also a stream that says nothing learns that it is fenced."""
        for stream, epoch in self._streams.get(fenced.pool.executor, {}).items():
            if epoch <= fenced.epoch:
                stream.cancel()
        try:
            self._epochs.session(fenced.pool.executor, fenced.epoch, self._epochs.boot_id)
        except JitneyError as error:
            self._host.streams.end(fenced.owner, error)

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
                self._host.touch()
                session.redeclare(decode_declared(declared))
                self._host.settle()
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
                if name not in ("", message.executor):
                    what = f"the stream is that of {name!r}"
                    raise InvalidRequest(what, field="executor", limit=name, value=message.executor)
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
            batch = decode_batch(message)
            self._host.touch()
            began = time.perf_counter_ns()
            answer = session.apply(batch)
            apply_us = (time.perf_counter_ns() - began) // 1000
            self._host.settle()
            if session.tiers is not None:
                answer = replace(answer, lower=self._host.with_rates(answer.lower))
            return encode_answer(answer, epoch=session.epoch, boot_id=self._epochs.boot_id, apply_us=apply_us)

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        """Hits of chains on the device and below it."""
        if len(request.chains) > MAX_CHAINS:
            count = len(request.chains)
            raise InvalidRequest(
                f"{count} chains, the limit is {MAX_CHAINS}", field="chains", limit=MAX_CHAINS, value=count
            )
        ledger = self._epochs.of(request.executor).ledger
        return encode_hits([ledger.lookup(chain) for chain in decode_chains(request)])

    async def Tickets(self, requests: AsyncIterator[pb.TicketCall], context: Any) -> AsyncIterator[pb.TicketEvent]:
        """Tells what is open, then what is new, while it hears what became of it."""
        queue: Queue = asyncio.Queue()
        hearing = asyncio.create_task(self._hear(requests, queue))
        try:
            while True:
                event = await queue.get()
                if event is None:
                    return
                if isinstance(event, Exception):
                    raise event
                yield encode_event(event)
        finally:
            hearing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hearing

    async def _hear(self, requests: AsyncIterator[pb.TicketCall], queue: Queue) -> None:
        """Passes on what an executor says; ends the stream with its last word, or with what is wrong."""
        owner: Owner | None = None
        try:
            async for message in requests:
                session = self._session(message)
                call = decode_call(message)
                if owner is None:
                    owner = session.owner
                    self._host.welcome(owner, queue)
                elif owner != session.owner:
                    what = f"the stream is that of {owner[0]!r}, epoch {owner[1]}"
                    raise InvalidRequest(what, field="executor", limit=owner[0], value=session.owner[0])
                if call is not None:
                    self._host.told(owner, call)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)  # raised where the stream is answered
        finally:
            if owner is not None:
                self._host.streams.closed(owner, queue)

    async def Invalidate(self, request: pb.InvalidateRequest, context: Any) -> pb.InvalidateResponse:
        """Removes content, with all behind it, from every tier; not before it is known whether the SSD has any."""
        kind = request.WhichOneof("what")
        if kind is None:
            raise InvalidRequest("name a prefix key, tenant, salt digest or model version", field="what")
        what = What(**{kind: getattr(request, kind)})
        await self._host.prepared()
        gone = self._invalidate(what)
        if self._host.scanning:
            if not self._forgotten:
                self._host.when_scanned.append(self._forget_again)
            self._forgotten.append(what)
        self._log.info("invalidated", what=kind, device=gone.device_blocks, cpu=gone.cpu_blocks, ssd=gone.ssd_blocks)
        return gone

    def _invalidate(self, what: What, also: Collection[Key] = ()) -> pb.InvalidateResponse:
        tiers = self._host.tiers
        self._host.touch()
        ledgers = [session.ledger for session in self._epochs.sessions.values()]
        gone = invalidate(ledgers, () if tiers is None else (tiers,), what, also)
        self._host.settle()
        return pb.InvalidateResponse(device_blocks=gone.device, cpu_blocks=gone.cpu, ssd_blocks=gone.ssd)

    def _is_forgotten(self, entry: DiskEntry) -> bool:
        """Whether the scan comes upon something that was invalidated meanwhile."""
        unwanted = entry.parent in self._unwanted or any(
            what.of(entry.content.origin) or what.prefix_key in (entry.key, entry.parent) for what in self._forgotten
        )
        if unwanted:
            self._unwanted.add(entry.key)
        return unwanted

    def _forget_again(self) -> None:
        """What the scan found before that on which it stands, and which was invalidated meanwhile."""
        forgotten, self._forgotten = self._forgotten, []
        unwanted, self._unwanted = self._unwanted, set()
        for what in forgotten:
            self._invalidate(what, unwanted)

    async def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditResponse:
        """Checks every ledger, and the lower tiers, against themselves and each other."""
        findings = self._findings()
        checked = sum(session.pool.blocks for session in self._epochs.sessions.values())
        if self._host.tiers is not None:
            usage = self._host.tiers.usage()
            checked += usage.cpu.slots + usage.ssd.slots
        return pb.AuditResponse(ok=not findings, findings=findings, checked_blocks=checked)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """What is open, and what it came to."""
        return status(self._epochs, self._host, self._unsound)

    async def audit_when_idle(self, idle_s: float, set_serving: SetServing) -> None:
        """Audits what has changed, once nothing has happened for `idle_s`; turns readiness off while it finds
        something. Runs until it is cancelled."""
        seen = clean = -1
        while True:
            await asyncio.sleep(idle_s)
            if (now := self._host.changes) == seen != clean:
                clean = now
                await self._judge(self._findings(), set_serving)
            seen = now

    async def _judge(self, findings: list[str], set_serving: SetServing) -> None:
        for finding in findings:
            self._log.error("audit", finding=finding)
        unsound = f"the audit found: {findings[0]}" if findings else ""
        if unsound != self._unsound:
            self._unsound = unsound
            await set_serving(unsound)

    def _findings(self) -> list[str]:
        findings: list[str] = []
        for name, session in self._epochs.sessions.items():
            findings += [f"{name}: {finding}" for finding in audit(session.ledger)]
        if self._host.tiers is not None:
            findings += audit_tiers(self._host.tiers)
        return findings

    def _session(self, message: pb.Declaration | pb.Batch | pb.TicketCall) -> Session:
        return self._epochs.session(message.executor, message.epoch, message.boot_id)


def settings_of(config: CacheConfig) -> TierSettings:
    """What there is below the device."""
    assert config.shared_dir is not None  # settled
    return TierSettings(
        shared_dir=config.shared_dir,
        cpu_bytes=config.cpu_bytes,
        ssd_dir=config.ssd_dir,
        ssd_bytes=config.ssd_bytes,
        ssd_file_bytes=config.ssd_file_bytes,
        limits=TierLimits(
            pin_permille=config.pin_permille,
            pin_limit_us=int(config.pin_limit_s * 1e6),
            interval_blocks=config.interval_blocks,
            tenant_permille=config.tenant_permille,
        ),
        order=ORDERS[config.eviction],
    )


async def serve(config: CacheConfig, boot_id: bytes, calls: DiskCalls | None = None) -> int:
    """Serves until a signal; returns the exit status. `boot_id` is 16 bytes, new at every start."""
    server = build_server(config, "cache")
    feed = Feed() if config.kv_events else None
    host = TierHost(settings_of(config), boot_id.hex(), calls, feed)
    epochs = Epochs(boot_id, plain_index if feed is None else feed.device, ORDERS[config.eviction])
    servicer = CacheServicer(epochs, host)
    cache_pb2_grpc.add_CacheServicer_to_server(servicer, server.grpc)
    server.offer(SERVICE)
    tasks = [asyncio.create_task(host.watch_processes())]
    if config.audit_idle_s > 0:
        tasks.append(asyncio.create_task(servicer.audit_when_idle(config.audit_idle_s, server.set_serving)))

    async def prepare() -> None:
        await host.prepare()
        if feed is not None:
            publisher = published(feed, config)
            host.on_settled = publisher.flush
            ends.callback(publisher.close)

    async def close() -> None:
        for task in tasks:
            task.cancel()
        await host.close(max(0.0, config.grace_s - server.stopping_for_s()))

    with contextlib.ExitStack() as ends:
        return await serve_until_signal(server, prepare=prepare, on_stop=close)


def published(feed: Feed, config: CacheConfig) -> EventPublisher:
    """The feed's events, from now on. InvalidRequest without the packages, Away if an address cannot be had."""
    try:
        from cache_svc.kv_events_publisher import EventPublisher
    except ImportError as error:
        what = f"--kv-events needs {error.name}: pip install 'jitney[events]'"
        raise InvalidRequest(what, field="kv_events", value=config.kv_events) from error
    publisher = EventPublisher(feed, config.kv_events_topic, config.kv_events_kept, time.time)
    at, replay_at = publisher.open(config.kv_events, config.kv_events_replay)
    logs.get("kv_events").info("published, token ids of all tenants included", at=at, replay_at=replay_at)
    return publisher
