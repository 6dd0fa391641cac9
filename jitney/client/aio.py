"""The client: one executor (or several behind one target), called from an event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio

from jitney.client import wire
from jitney.client.answer import AsyncAnswer, EventCall, OnFinished
from jitney.client.chat import AsyncChat
from jitney.client.retry import Patience, RetryPolicy, as_error, is_lost
from jitney.client.types import (
    GREEDY,
    CachedPrefix,
    Completion,
    Explanation,
    Message,
    ModelInfo,
    Options,
    Prompt,
    Status,
)
from jitney.executor.v1 import executor_pb2 as pb
from jitney.executor.v1 import executor_pb2_grpc
from jitney.serving import channels

DEFAULT_TARGET: Final = "127.0.0.1:50051"
UNARY_TIMEOUT_S: Final = 30.0


class AsyncClient:
    """Calls an executor. To be used from one event loop; `async with` closes its connection.

    Every call that finds nobody there is tried again within the retry policy; errors are classes of `jitney.errors`.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        retry: RetryPolicy | None = None,
        tls_ca: Path | None = None,
    ) -> None:
        self._target = target
        self._shown_target = target if isinstance(target, str) else ",".join(target)
        self._tls_ca = tls_ca
        self._retry = retry or RetryPolicy()
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connection; running answers are cancelled."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = self._stub = None

    def generate(self, prompt: Prompt, options: Options = GREEDY, *, request_id: str = "") -> AsyncAnswer:
        """An answer as a stream of events. Raises InvalidRequest at once for what no message can hold."""
        return self._answer(prompt, options, None, request_id)

    async def generate_once(self, prompt: Prompt, options: Options = GREEDY, *, request_id: str = "") -> Completion:
        """An answer in one message, by the unary call. If its executor dies, it begins anew within `connect_s`."""
        request = wire.generate_request(prompt, options, request_id or new_request_id())
        return wire.completion(await self._unary("GenerateOnce", request, None))

    def chat(self, system: str = "", options: Options = GREEDY, history: Sequence[Message] = ()) -> AsyncChat:
        """A conversation that keeps its messages and the ids that were generated for them."""
        return AsyncChat(self._answer, system, options, history)

    async def abort(self, request_id: str) -> None:
        """Ends a live request. Raises Missing if there is none of that id."""
        await self._unary("Abort", pb.AbortRequest(request_id=request_id))

    async def model_info(self) -> ModelInfo:
        """The model that is served."""
        return wire.model_info(await self._unary("GetModelInfo", pb.GetModelInfoRequest()))

    async def status(self, history_steps: int = 0) -> Status:
        """What runs and what waits, with the newest so many steps."""
        return wire.status(await self._unary("GetStatus", pb.GetStatusRequest(history_steps=history_steps)))

    async def set_policy(self, name: str, parameters: Mapping[str, int] | None = None) -> int:
        """Changes the policy; returns the first step that it decides."""
        request = pb.SetPolicyRequest(policy=wire.policy_choice(name, parameters or {}))
        answer: pb.SetPolicyResponse = await self._unary("SetPolicy", request)
        return answer.from_step

    async def explain(self, request_id: str) -> Explanation:
        """Why a live request is where it is. Raises Missing if there is none of that id."""
        request = pb.ExplainRequestRequest(request_id=request_id)
        return wire.explanation(await self._unary("ExplainRequest", request))

    async def explain_cache(self, prompt: Prompt, salt: str = "") -> CachedPrefix:
        """How much of a prompt is cached, and where it leaves the cached prefix."""
        return wire.cached_prefix(await self._unary("ExplainCache", wire.explain_cache_request(prompt, salt)))

    def _answer(
        self, prompt: Prompt, options: Options, on_finished: OnFinished | None, request_id: str = ""
    ) -> AsyncAnswer:
        request = wire.generate_request(prompt, options, request_id or new_request_id())
        return AsyncAnswer(self._open_stream, self.abort, request, self._retry, self._shown_target, on_finished)

    def _connected(self) -> Any:
        if self._stub is None:
            self._channel = channels.channel(self._target, tls_ca=self._tls_ca)
            self._stub = executor_pb2_grpc.ExecutorStub(self._channel)
        return self._stub

    def _open_stream(self, request: pb.GenerateRequest) -> EventCall:
        call: EventCall = self._connected().Generate(request)
        return call

    async def _unary(self, method: str, request: object, timeout_s: float | None = UNARY_TIMEOUT_S) -> Any:
        patience = Patience(self._retry, begun=False)
        while True:
            try:
                return await getattr(self._connected(), method)(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                wait_s = patience.next_wait_s() if is_lost(error) else None
                if wait_s is None:
                    raise as_error(error, self._shown_target) from error
            await asyncio.sleep(wait_s)


def new_request_id() -> str:
    """An id that no other request has."""
    return uuid.uuid4().hex
