"""The executor's gRPC service: requests in through the door, answers out as fast as each reader takes them.

Every stream is a cursor on its answer. Whatever ends a stream early (the client cancels, its connection breaks, it
does not read, the server drains) ends the request with it, so that no work goes on for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from executor_svc import wire
from executor_svc.door import Door, Entry
from executor_svc.engine import EngineStatus
from executor_svc.limits import Limits
from executor_svc.request import Answer, Finish, FinishReason, Submission
from executor_svc.situation import Reads
from executor_svc.streaming import Bells, Cursor
from executor_svc.traced_model import RequestSpans
from jitney.errors import Aborted, Away, Expired, JitneyError, Missing, TooLarge
from jitney.executor.v1 import executor_pb2 as pb
from jitney.executor.v1 import executor_pb2_grpc
from jitney.scheduler.v1 import scheduler_pb2
from jitney.serving import tracing
from jitney.snapshot import PolicyChoice, Snapshot

DOOR_THREADS = 4
MAX_HISTORY_STEPS = 1 << 16
LOADING_RETRY_US = 1_000_000
_FOREVER_S = 7 * 24 * 3600.0


class EnginePort(Protocol):
    """The engine (engine.py), as far as the server uses it; callable from any thread."""

    def submit(self, submission: Submission, on_change: Callable[[], None]) -> Answer: ...
    def abort(self, client_id: str) -> None: ...
    def abort_request(self, request_id: int) -> None: ...
    def status(self, history_steps: int = 0) -> EngineStatus: ...
    def explain(self, client_id: str) -> tuple[int, Snapshot | None, list[str]]: ...
    def set_policy(self, choice: PolicyChoice, reads: Reads | None = None) -> int: ...


class Advice(Protocol):
    """What the server asks of a scheduler by itself. Raises JitneyError; Away if none answers."""

    async def explain(self, snapshot: Snapshot, request_id: int) -> scheduler_pb2.Explanation:
        """Missing if the snapshot does not name the request."""

    async def try_policy(self, choice: PolicyChoice) -> Reads | None:
        """Returns what it reads if a scheduler decides by it."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A request that was let in, and what its reader needs; no answer if it had ended before."""

    entry: Entry
    answer: Answer | None
    bell: asyncio.Event


Send = Callable[[pb.GenerateEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the service stands on, once the model is loaded."""

    engine: EnginePort
    door: Door
    advice: Advice
    info: pb.GetModelInfoResponse
    spans: RequestSpans = field(default_factory=dict)  # of requests that no step has run yet, while traced


class ExecutorService(executor_pb2_grpc.ExecutorServicer):
    """Belongs to the event loop that it was made in. Answers UNAVAILABLE until it is given its parts."""

    def __init__(self, limits: Limits, cached_price_ppm: int = 0) -> None:
        self._given: Parts | None = None
        self._limits = limits
        self._price = cached_price_ppm
        self._bells = Bells(asyncio.get_running_loop())
        self._threads = ThreadPoolExecutor(DOOR_THREADS, thread_name_prefix="door")
        self._refused = 0

    def open(self, parts: Parts) -> None:
        """From here on requests are served."""
        self._given = parts

    def close(self) -> None:
        """Ends the door's threads, once no call runs any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _parts(self) -> Parts:
        if self._given is None:
            raise Away("the executor is loading its model", retry_after_us=LOADING_RETRY_US)
        return self._given

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Started, then deltas, then Finished; a request that did not end by itself ends with a status, too."""

        async def send(event: pb.GenerateEvent) -> None:
            await self._write(context, event)

        async with self._opened(request, context) as opened:
            await send(pb.GenerateEvent(started=opened.entry.started))
            finish = await self._follow(opened, send)
            await send(pb.GenerateEvent(finished=self._finished(finish, opened)))
            raise_unless_whole(finish)

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateOnceResponse:
        """The whole answer in one message."""
        whole = pb.GenerateOnceResponse()
        texts: list[str] = []

        async def collect(event: pb.GenerateEvent) -> None:
            whole.token_ids.extend(event.delta.token_ids)
            whole.logprobs.extend(event.delta.logprobs)
            texts.append(event.delta.text)

        async with self._opened(request, context) as opened:
            finish = await self._follow(opened, collect)
            raise_unless_whole(finish)
            whole.started.CopyFrom(opened.entry.started)
            whole.finished.CopyFrom(self._finished(finish, opened))
        whole.text = "".join(texts)
        return whole

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Ends a live request."""
        self._parts.engine.abort(request.request_id)
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """The model that is served."""
        return self._parts.info

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """What runs, what waits and why."""
        steps = min(request.history_steps, MAX_HISTORY_STEPS)
        return wire.status(await asyncio.to_thread(self._parts.engine.status, steps), self._refused)

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Any) -> pb.SetPolicyResponse:
        """Changes the policy, once a scheduler has shown that it can decide by it."""
        choice = wire.policy_choice(request.policy)
        if not choice.tables:  # those that there are stay
            status = await asyncio.to_thread(self._parts.engine.status)
            choice = replace(choice, tables=status.policy.tables)
        reads = await self._parts.advice.try_policy(choice)
        step = await asyncio.to_thread(self._parts.engine.set_policy, choice, reads)
        return pb.SetPolicyResponse(from_step=step)

    async def ExplainRequest(self, request: pb.ExplainRequestRequest, context: Any) -> pb.ExplainRequestResponse:
        """Why a live request is where it is."""
        request_id, snapshot, history = self._parts.engine.explain(request.request_id)
        explanation = await self._explanation(request_id, snapshot)
        return pb.ExplainRequestResponse(explanation=explanation, history=history)

    async def _explanation(self, request_id: int, snapshot: Snapshot | None) -> scheduler_pb2.Explanation:
        if snapshot is None:
            return scheduler_pb2.Explanation(state="waiting", sentence="no scheduler was asked yet")
        try:
            return await self._parts.advice.explain(snapshot, request_id)
        except Missing:
            return scheduler_pb2.Explanation(state="waiting", sentence="it came after the last snapshot")
        except Away as error:
            return scheduler_pb2.Explanation(sentence=f"no scheduler answers: {error.message}")

    @contextlib.asynccontextmanager
    async def _opened(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[_Opened]:
        """Lets the request in; ends it if it is still live when its call is over."""
        bell = asyncio.Event()
        with tracing.span("request", endpoint=request.endpoint, tenant=request.tenant) as span:
            entry, answer = await self._let_in(request, _time_left_us(context), lambda: self._bells.ring(bell))
            span.set(request_id=entry.started.request_id, prompt_tokens=entry.started.prompt_tokens)
            if answer is not None and tracing.enabled():
                self._parts.spans[answer.request_id] = span
            try:
                yield _Opened(entry, answer, bell)
            finally:
                if answer is not None:
                    self._parts.spans.pop(answer.request_id, None)
                    if answer.finish is None:
                        self._parts.engine.abort_request(answer.request_id)
                    span.set(generated_tokens=len(answer.token_ids), **_of_finish(answer.finish))

    async def _let_in(
        self, request: pb.GenerateRequest, time_left_us: int | None, ring: Callable[[], None]
    ) -> tuple[Entry, Answer | None]:
        """Door and engine, on a thread of their own: tokenising may take a while."""

        parts = self._parts

        def let_in() -> tuple[Entry, Answer | None]:
            entry = parts.door.admit(request, time_left_us)
            return entry, None if entry.ended else parts.engine.submit(entry.submission, ring)

        future = self._threads.submit(let_in)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._abandon)
            raise
        except JitneyError:
            self._refused += 1
            raise

    def _abandon(self, future: Future[tuple[Entry, Answer | None]]) -> None:
        """The client has gone while its request was on its way in."""
        if not future.cancelled() and future.exception() is None:
            answer = future.result()[1]
            if answer is not None:
                self._parts.engine.abort_request(answer.request_id)

    async def _follow(self, opened: _Opened, send: Send) -> Finish:
        """Sends what comes, until the end; returns it. Raises Away if the executor stops: another one can go on."""
        if opened.answer is None:
            assert opened.entry.ended is not None
            if opened.entry.ended_text:
                await send(wire.delta_event((), (), opened.entry.ended_text))
            return opened.entry.ended
        cursor = Cursor(opened.answer, opened.entry.submission.logprobs >= 0)
        while True:
            opened.bell.clear()
            finish = opened.answer.finish
            if finish is not None and finish.reason is FinishReason.ERROR:
                raise Away(finish.message or "the executor stops", retry_after_us=1_000_000)
            tokens, logprobs, text = cursor.next(finish is not None)
            if tokens or text:
                await send(wire.delta_event(tokens, logprobs, text))
            if finish is not None:
                return finish
            if not (tokens or text):
                await opened.bell.wait()

    async def _write(self, context: Any, event: pb.GenerateEvent) -> None:
        """One message; raises TooLarge if the reader takes nothing for too long."""
        limit_s = self._limits.reader_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await context.write(event)
        except TimeoutError:
            what = f"the reader has taken nothing for {limit_s:g} s"
            raise TooLarge(what, field="stream", limit=f"{limit_s:g} s", value="full") from None

    def _finished(self, finish: Finish, opened: _Opened) -> pb.Finished:
        here = len(opened.answer.token_ids) if opened.answer is not None else 0
        return wire.finished(finish, here, self._price)


def raise_unless_whole(finish: Finish) -> None:
    """The status of a request that did not come to its own end."""
    message = finish.message or finish.reason.name.lower()
    if finish.reason is FinishReason.ABORTED:
        raise Aborted(message)
    if finish.reason is FinishReason.DEADLINE:
        raise Expired(message, field="deadline_ms")
    if finish.reason is FinishReason.REFUSED:
        raise TooLarge(message)


def _of_finish(finish: Finish | None) -> dict[str, str | int]:
    """Attributes of the request's span."""
    if finish is None:
        return {"finish": "abandoned"}
    return {
        "finish": finish.reason.name.lower(),
        "cached_tokens": finish.cached_device_tokens + finish.cached_cpu_tokens + finish.cached_ssd_tokens,
        "preemptions": finish.preemptions,
        "queue_us": finish.queue_us,
        "ttft_us": finish.ttft_us,
        "steps": finish.steps,
    }


def _time_left_us(context: Any) -> int | None:
    left_s = context.time_remaining()
    return None if left_s is None or left_s > _FOREVER_S else max(1, int(left_s * 1e6))
