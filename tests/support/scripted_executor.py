"""An executor on a real gRPC server whose answers are known and whose streams break where a test says so.

The answer to any prompt is `IDS`, one token a message; its text lags `lag` tokens behind and holds characters of
several bytes. A resume goes on exactly as the contract says, and is checked: same hint, ids that were sent, and text
after the bytes that were received.

Asked for several answers, choice c is the answer less its last c tokens; the choices take turns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from jitney.client.wire import policy_choice
from jitney.errors import Aborted, JitneyError
from jitney.executor.v1 import executor_pb2 as pb
from jitney.executor.v1 import executor_pb2_grpc
from jitney.scheduler.v1 import scheduler_pb2
from jitney.serving import status

PIECES = ("To", " be", " or", " nö", "t", " tö", " bé", ",", " that", " is", " 質問", " —", " whether", " 't", "is", "")
IDS = tuple(range(100, 100 + len(PIECES)))
TEXT = "".join(PIECES)
HINT = {"seed": 7, "prompt_digest": b"d" * 32, "model_version": "m", "fingerprint": b"f" * 32}


@dataclass(slots=True)
class Break:
    """One stream ends after so many new tokens: with a code, with a typed error, or (neither) as if all were well."""

    after_tokens: int
    code: grpc.StatusCode | None = None
    error: JitneyError | None = None
    before_started: bool = False
    details: str = "broken by the test"


@dataclass(slots=True)
class ScriptedExecutor(executor_pb2_grpc.ExecutorServicer):
    """Streams `IDS`; the n-th stream breaks as `breaks[n]` says, those behind them do not."""

    breaks: list[Break] = field(default_factory=list)
    lag: int = 2
    pause_s: float = 0.0
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: int = 0
    aborts: bool = True
    aborted: list[str] = field(default_factory=list)
    policies: list[scheduler_pb2.PolicyChoice] = field(default_factory=list)
    not_identical: bool = False
    not_ready: str = ""
    unary_failures: int = 0
    explained: list[pb.GenerateRequest] = field(default_factory=list)
    keys: dict[str, list[bytes]] = field(default_factory=dict)  # of a prompt that ends with this text; else of ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        script = self.breaks[len(self.requests)] if len(self.requests) < len(self.breaks) else None
        self.requests.append(request)
        done = len(request.resume.token_ids)
        if script is not None and script.before_started:
            await self._break(script, context)
            return
        yield pb.GenerateEvent(started=self._started(request))
        if request.n > 1:
            async for event in self._several(request, script, context):
                yield event
            return
        given = request.resume.text_bytes_received
        try:
            for position in range(done, self._end(request)):
                if script is not None and position == done + script.after_tokens:
                    await self._break(script, context)
                    return
                if self.aborts and request.request_id in self.aborted:
                    yield self._finished(pb.FINISH_REASON_ABORTED, request, position)
                    await status.abort(context, Aborted("by another call"))
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)
                text = _bytes_of(position + 1 - self.lag)[given:]
                given += len(text)
                logprobs = self._logprobs()[position : position + 1]
                yield pb.GenerateEvent(delta=pb.Delta(token_ids=[IDS[position]], text=text.decode(), logprobs=logprobs))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if script is not None:
            await self._break(script, context)
            return
        if rest := _bytes_of(self._end(request))[given:]:
            yield pb.GenerateEvent(delta=pb.Delta(text=rest.decode()))
        reason = pb.FINISH_REASON_LENGTH if self._end(request) < len(IDS) else pb.FINISH_REASON_STOP
        yield self._finished(reason, request, self._end(request))

    async def _several(self, request: pb.GenerateRequest, script: Break | None, context: Any) -> AsyncIterator[Any]:
        ends = [len(IDS) - choice for choice in range(request.n)]
        came = request.resume.choices or [pb.ResumeChoice()] * request.n
        new = 0
        for position in range(len(IDS) + 1):
            for choice, (end, had) in enumerate(zip(ends, came, strict=True)):
                given = max(had.text_bytes_received, len(_bytes_of(position - self.lag)))
                if len(had.token_ids) <= position < end:
                    if script is not None and new == script.after_tokens:
                        await self._break(script, context)
                        return
                    new += 1
                    text = _bytes_of(position + 1 - self.lag)[given:].decode()
                    yield pb.GenerateEvent(delta=pb.Delta(token_ids=[IDS[position]], text=text, choice=choice))
                if position == end:
                    given = max(had.text_bytes_received, len(_bytes_of(end - self.lag)))
                    yield pb.GenerateEvent(delta=pb.Delta(text=_bytes_of(end)[given:].decode(), choice=choice))
                    last = pb.ChoiceEnd(choice=choice, reason=pb.FINISH_REASON_STOP, generated_tokens=end)
                    yield pb.GenerateEvent(choice_end=last)
        yield self._finished(pb.FINISH_REASON_STOP, request, sum(ends))

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateOnceResponse:
        self.requests.append(request)
        if self.unary_failures > 0:
            self.unary_failures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        finished = self._finished(pb.FINISH_REASON_STOP, request, len(IDS)).finished
        return pb.GenerateOnceResponse(
            started=self._started(request), token_ids=IDS, text=TEXT, logprobs=self._logprobs(), finished=finished
        )

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        self.aborted.append(request.request_id)
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            name="scripted", vocabulary=200, eos_token_ids=[2], bit_invariant=True, has_chat_template=True
        )

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(
            executor="scripted",
            backend="native",
            num_running=3,
            num_waiting=2,
            decisions=7,
            finished_stop=5,
            waiting_reasons=[scheduler_pb2.ReasonCount(reason=scheduler_pb2.WAIT_REASON_BLOCKS, count=2)],
            history=[pb.StepRecord(step=1, rows=4)] * min(1, request.history_steps),
            policy=policy_choice("fcfs", {"chunk_cap": 64}),
            not_ready=self.not_ready,
        )

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Any) -> pb.SetPolicyResponse:
        self.policies.append(request.policy)
        return pb.SetPolicyResponse(from_step=42)

    async def ExplainRequest(self, request: pb.ExplainRequestRequest, context: Any) -> pb.ExplainRequestResponse:
        sentence = "needs 37 blocks, 12 free after 25 reserved"
        said = scheduler_pb2.Explanation(
            state="waiting", reason=scheduler_pb2.WAIT_REASON_BLOCKS, sentence=sentence, needed=37, available=12
        )
        return pb.ExplainRequestResponse(explanation=said, history=["arrived"])

    async def ExplainCache(self, request: pb.ExplainCacheRequest, context: Any) -> pb.ExplainCacheResponse:
        self.explained.append(request.request)
        asked = request.request
        text = asked.chat.messages[-1].content if asked.chat.messages else asked.text
        keys = self.keys.get(text, self.keys.get("", [bytes([number]) * 32 for number in range(7)]))
        return pb.ExplainCacheResponse(
            prompt_tokens=100,
            block_tokens=16,
            device_tokens=32,
            ssd_tokens=16,
            hit_tokens=48,
            sentence="it leaves the cached prefix at token 48: kept no more",
            prefix_key=keys[-1] if len(keys) > 1 else b"",
            model_version="m",
            keys=keys,
        )

    async def _break(self, script: Break, context: Any) -> None:
        if script.error is not None:
            await status.abort(context, script.error)
        if script.code is not None:
            await context.abort(script.code, script.details)

    def _started(self, request: pb.GenerateRequest) -> pb.Started:
        if request.HasField("resume"):
            for came in request.resume.choices or [request.resume]:
                assert tuple(came.token_ids) == IDS[: len(came.token_ids)]
            assert len(request.resume.choices) == (request.n if request.n > 1 else 0)
            assert request.resume.hint.prompt_digest == HINT["prompt_digest"]
            assert request.resume.text_bytes_received <= len(TEXT.encode())
        hint = pb.ResumeHint(**HINT, not_identical=self.not_identical and request.HasField("resume"))  # type: ignore[arg-type]
        return pb.Started(
            request_id=request.request_id,
            hint=hint,
            prompt_tokens=5,
            max_tokens=self._end(request),
            prompt_token_ids=[1],
        )

    def _end(self, request: pb.GenerateRequest) -> int:
        return min(request.max_tokens, len(IDS)) if request.HasField("max_tokens") else len(IDS)

    def _logprobs(self) -> list[pb.TokenLogprobs]:
        return [pb.TokenLogprobs(logprob=-float(i), top_ids=[i], top_logprobs=[-0.5]) for i in range(len(IDS))]

    def _finished(self, reason: pb.FinishReason, request: pb.GenerateRequest, tokens: int) -> pb.GenerateEvent:
        usage = pb.Usage(
            prompt_tokens=5,
            generated_tokens=tokens,
            cached_device_tokens=2,
            cached_ssd_tokens=2,
            computed_prompt_tokens=1,
            billable_tokens=tokens + 2,
        )
        timings = pb.Timings(queue_us=1, ttft_us=2, total_us=3, tpot_us=4, steps=tokens)
        return pb.GenerateEvent(
            finished=pb.Finished(reason=reason, usage=usage, timings=timings, stop_token_id=IDS[-1])
        )


def _bytes_of(pieces: int) -> bytes:
    return "".join(PIECES[: max(0, pieces)]).encode()


@asynccontextmanager
async def serving(executor: ScriptedExecutor, port: int = 0) -> AsyncIterator[str]:
    """Serves it; yields the target."""
    server = grpc.aio.server()
    executor_pb2_grpc.add_ExecutorServicer_to_server(executor, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class InThread:
    """A scripted executor on a thread of its own, for callers that block."""

    def __init__(self, executor: ScriptedExecutor) -> None:
        self._executor = executor
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._done = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))

    async def _run(self) -> None:
        async with serving(self._executor) as self.target:
            self._up.set()
            await self._done.wait()

    def __enter__(self) -> str:
        self._thread.start()
        self._up.wait()
        return self.target

    def __exit__(self, *args: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()
        self._loop.close()
