"""The executor's gRPC service: requests in through the door, answers out as fast as each reader takes them.

Every stream is a cursor on its answer. Whatever ends a stream early (the client cancels, its connection breaks, it
does not read, the server drains) ends the request with it, so that no work goes on for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from executor_svc import wire
from executor_svc.cache_explained import explained
from executor_svc.door import Asked, Door, Entry
from executor_svc.engine import EngineStatus
from executor_svc.limits import Limits
from executor_svc.readers import Readers
from executor_svc.request import Answer, Finish, FinishReason, Submission, whole_finish
from executor_svc.situation import Reads
from executor_svc.streaming import Bells, Cursor
from executor_svc.traced_model import RequestSpans
from jitney.block_ops import ChainHits
from jitney.errors import Aborted, Away, Expired, JitneyError, Missing, TooLarge
from jitney.executor.v1 import executor_pb2 as pb
from jitney.executor.v1 import executor_pb2_grpc
from jitney.keys import Key, Root, chain
from jitney.scheduler.v1 import scheduler_pb2
from jitney.serving import tracing
from jitney.snapshot import PolicyChoice, Snapshot

DOOR_THREADS = 4
MAX_HISTORY_STEPS = 1 << 16
LOADING_RETRY_US = 1_000_000
_FOREVER_S = 7 * 24 * 3600.0


class EnginePort(Protocol):
    """The engine (engine.py), as far as the server uses it; callable from any thread."""

    def submit(self, choices: Sequence[Submission], on_change: Callable[[], None]) -> list[Answer]: ...
    def abort(self, client_id: str) -> None: ...
    def abort_rows(self, ids: Collection[int]) -> None: ...
    def status(self, history_steps: int = 0) -> EngineStatus: ...
    def explain(self, client_id: str) -> tuple[int, Snapshot | None, list[str]]: ...
    def set_policy(self, choice: PolicyChoice, reads: Reads | None = None) -> int: ...


class Advice(Protocol):
    """What the server asks of a scheduler by itself. Raises JitneyError; Away if none answers."""

    async def explain(self, snapshot: Snapshot, request_id: int) -> scheduler_pb2.Explanation:
        """Missing if the snapshot does not name the request."""

    async def try_policy(self, choice: PolicyChoice) -> Reads | None:
        """Returns what it reads if a scheduler decides by it."""


class FindsChains(Protocol):
    """The cache's client, as far as the server uses it."""

    async def find(self, keys: Sequence[Key]) -> ChainHits: ...


@dataclass(frozen=True, slots=True)
class _Opened:
    """A request that was let in, and what its reader needs: of each choice its answer, None if it had ended before."""

    entry: Entry
    answers: Sequence[Answer | None]
    bell: asyncio.Event

    @property
    def live(self) -> list[Answer]:
        """Those that the engine has."""
        return [answer for answer in self.answers if answer is not None]


Send = Callable[[pb.GenerateEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the service stands on, once the model is loaded."""

    engine: EnginePort
    door: Door
    advice: Advice
    info: pb.GetModelInfoResponse
    cache: FindsChains
    spans: RequestSpans = field(default_factory=dict)  # of requests that no step has run yet, while traced


class ExecutorService(executor_pb2_grpc.ExecutorServicer):
    """Belongs to the event loop that it was made in. Answers UNAVAILABLE until it is given its parts."""

    def __init__(self, limits: Limits, cached_price_ppm: int = 0) -> None:
        self._given: Parts | None = None
        self._price = cached_price_ppm
        self._bells = Bells(asyncio.get_running_loop())
        self._readers = Readers(asyncio.get_running_loop(), limits.reader_timeout_s)
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

        send = partial(self._readers.write, context)
        async with self._opened(request, context) as opened:
            await send(pb.GenerateEvent(started=opened.entry.started))
            finish = await self._follow(opened, send)
            await send(pb.GenerateEvent(finished=self._finished(finish, opened)))
            raise_unless_whole(finish)

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateOnceResponse:
        """The whole answer in one message."""
        async with self._opened(request, context) as opened:
            whole = pb.GenerateOnceResponse(started=opened.entry.started)
            count = len(opened.answers)
            parts: list[pb.Choice | pb.GenerateOnceResponse] = (
                [whole.choices.add() for _ in range(count)] if count > 1 else [whole]
            )
            texts: list[list[str]] = [[] for _ in parts]

            async def collect(event: pb.GenerateEvent) -> None:
                if event.HasField("choice_end"):
                    whole.choices[event.choice_end.choice].end.CopyFrom(event.choice_end)
                    return
                part = parts[event.delta.choice]
                part.token_ids.extend(event.delta.token_ids)
                part.logprobs.extend(event.delta.logprobs)
                texts[event.delta.choice].append(event.delta.text)

            finish = await self._follow(opened, collect)
            raise_unless_whole(finish)
            whole.finished.CopyFrom(self._finished(finish, opened))
        for part, pieces in zip(parts, texts, strict=True):
            part.text = "".join(pieces)
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
        parts = self._parts
        return wire.status(await asyncio.to_thread(parts.engine.status, steps), self._refused, parts.info.backend)

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

    async def ExplainCache(self, request: pb.ExplainCacheRequest, context: Any) -> pb.ExplainCacheResponse:
        """How much of a prompt is cached, and where it leaves the cached prefix."""
        parts = self._parts
        info = parts.info

        def keys() -> tuple[int, list[Key]]:
            ids, salt = parts.door.prompt(request.request)
            root = Root(salt, info.version, "", info.fingerprint).key()
            return len(ids), [root, *chain(root, ids, info.block_tokens)]

        tokens, found = await asyncio.wrap_future(self._threads.submit(keys))
        hits = await parts.cache.find(found[1:])
        return explained(tokens, info.block_tokens, hits, found, info.version)

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
            entry, answers = await self._let_in(request, _time_left_us(context), lambda: self._bells.ring(bell))
            opened = _Opened(entry, answers, bell)
            span.set(request_id=entry.started.request_id, prompt_tokens=entry.started.prompt_tokens)
            if tracing.enabled():
                self._parts.spans.update((answer.request_id, span) for answer in opened.live)
            try:
                yield opened
            finally:
                for answer in opened.live:
                    self._parts.spans.pop(answer.request_id, None)
                self._abort(opened.live)
                if opened.live:
                    generated = sum(len(answer.token_ids) for answer in opened.live)
                    span.set(generated_tokens=generated, **_of_finish([answer.finish for answer in opened.live]))

    async def _let_in(
        self, request: pb.GenerateRequest, time_left_us: int | None, ring: Callable[[], None]
    ) -> tuple[Entry, list[Answer | None]]:
        """Door and engine, on a thread of their own: tokenising may take a while."""

        parts = self._parts

        def let_in() -> tuple[Entry, list[Answer | None]]:
            entry = parts.door.admit(request, time_left_us)
            asked = [choice.submission for choice in entry.choices if choice.ended is None]
            answers = iter(parts.engine.submit(asked, ring) if asked else ())
            return entry, [next(answers) if choice.ended is None else None for choice in entry.choices]

        future = self._threads.submit(let_in)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._abandon)
            raise
        except JitneyError:
            self._refused += 1
            raise

    def _abandon(self, future: Future[tuple[Entry, list[Answer | None]]]) -> None:
        """The client has gone while its request was on its way in."""
        if not future.cancelled() and future.exception() is None:
            self._abort([answer for answer in future.result()[1] if answer is not None])

    def _abort(self, answers: Sequence[Answer]) -> None:
        """Ends those that have not ended."""
        if left := {answer.request_id for answer in answers if answer.finish is None}:
            self._parts.engine.abort_rows(left)

    async def _follow(self, opened: _Opened, send: Send) -> Finish:
        """Sends what comes, until every choice has ended; returns how. Raises Away if the executor stops: another one
        can go on."""
        many = len(opened.answers) > 1
        following = [
            _Following(choice, asked, answer)
            for choice, (asked, answer) in enumerate(zip(opened.entry.choices, opened.answers, strict=True))
        ]
        while True:
            opened.bell.clear()  # first: what comes from here on rings again
            for each in following:
                if each.finish is None:
                    await each.pass_on(send, many=many)
            finishes = [each.finish for each in following if each.finish is not None]
            if len(finishes) == len(following):
                return whole_finish(finishes) if many else finishes[0]
            await opened.bell.wait()

    def _finished(self, finish: Finish, opened: _Opened) -> pb.Finished:
        here = max((len(answer.token_ids) for answer in opened.live), default=0)
        return wire.finished(finish, here, self._price)


class _Following:
    """What the client has of one choice. `finish` once it has all of it."""

    def __init__(self, choice: int, asked: Asked, answer: Answer | None) -> None:
        self._choice = choice
        self._asked = asked
        self._answer = answer
        self._cursor = None if answer is None else Cursor(answer, asked.submission.logprobs >= 0)
        self.finish: Finish | None = None

    async def pass_on(self, send: Send, *, many: bool) -> None:
        """Sends what is new of it. `many`: it is one of several choices."""
        finish = self._asked.ended if self._answer is None else self._answer.finish
        if finish is not None and finish.reason is FinishReason.ERROR:
            raise Away(finish.message or "the executor stops", retry_after_us=1_000_000)
        new = ((), (), self._asked.ended_text) if self._cursor is None else self._cursor.next(finish is not None)
        tokens, logprobs, text = new
        if tokens or text:
            await send(wire.delta_event(self._choice, tokens, logprobs, text))
        if finish is not None and many:
            await send(pb.GenerateEvent(choice_end=wire.choice_end(self._choice, finish)))
        self.finish = finish


def raise_unless_whole(finish: Finish) -> None:
    """The status of a request that did not come to its own end."""
    message = finish.message or finish.reason.name.lower()
    if finish.reason is FinishReason.ABORTED:
        raise Aborted(message)
    if finish.reason is FinishReason.DEADLINE:
        raise Expired(message, field="deadline_ms")
    if finish.reason is FinishReason.REFUSED:
        raise TooLarge(message)


def _of_finish(finishes: Sequence[Finish | None]) -> dict[str, str | int]:
    """Attributes of the request's span."""
    ended = [finish for finish in finishes if finish is not None]
    if len(ended) < len(finishes):
        return {"finish": "abandoned"}
    finish = whole_finish(ended) if len(ended) > 1 else ended[0]
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
