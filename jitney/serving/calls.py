"""What surrounds each call of a server: who may come in, who is in, and how errors leave.

The gate turns new calls away once it is closed, knows the calls that run, and can end them with a typed error. A
JitneyError that a handler raises becomes its status; anything else becomes INTERNAL with an id that the log has too,
never a traceback; bytes that are no message of the method are an InvalidRequest. Bidirectional streams are *sessions*
between services: they hold no work of a client, and end as soon as the gate closes; everything else is work, and goes
on.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from jitney.errors import Away, InvalidRequest, JitneyError
from jitney.serving import logs, status, tracing

Handler = Callable[[Any, Any], Any]
EXEMPT: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.")  # Answered while draining, and not waited for.


class Call:
    """One running call."""

    __slots__ = ("ended_by", "method", "session", "task")

    def __init__(self, method: str, session: bool, task: asyncio.Task[Any]) -> None:
        self.method = method
        self.session = session
        self.task = task
        self.ended_by: JitneyError | None = None

    def end(self, error: JitneyError) -> None:
        """Ends the call with this error."""
        if self.ended_by is None:
            self.ended_by = error
            self.task.cancel()


class Gate:
    """The calls of one server. Belongs to the server's event loop."""

    def __init__(self) -> None:
        self._running: set[Call] = set()
        self._closed: JitneyError | None = None
        self._changed = asyncio.Event()

    @property
    def running(self) -> int:
        """Calls that run now."""
        return len(self._running)

    def close(self, error: JitneyError) -> None:
        """From now on new calls get this error, and sessions end with it."""
        self._closed = error
        self.end(error, sessions_only=True)

    def end(self, error: JitneyError, *, sessions_only: bool = False) -> None:
        """Ends the calls that run."""
        for call in list(self._running):
            if call.session or not sessions_only:
                call.end(error)

    async def wait_idle(self, timeout_s: float) -> bool:
        """True once no call runs; False after the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._running:
                    self._changed.clear()
                    await self._changed.wait()
        return not self._running

    @contextlib.asynccontextmanager
    async def admit(self, method: str, session: bool, context: Any) -> AsyncIterator[None]:
        """Around one call: refuses it, or keeps it among the running ones; maps what it raises."""
        task = asyncio.current_task()
        assert task is not None
        call = Call(method, session, task)
        self._running.add(call)
        try:
            if self._closed is not None:
                raise self._closed
            yield
        except JitneyError as error:
            await status.abort(context, error)
        except asyncio.CancelledError:
            if call.ended_by is None:
                raise
            task.uncancel()
            await status.abort(context, call.ended_by)
        except grpc.aio.BaseError:
            raise
        except NotImplementedError:  # Of the generated base class: this service does not have the method.
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not offered here")
        except Exception as error:
            if context.cancelled():
                raise
            await status.abort(context, _unexpected(method, error))
        finally:
            self._running.discard(call)
            self._changed.set()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Puts gate and tracing around every call but health and reflection."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(EXEMPT):
            return handler
        session = handler.request_streaming and handler.response_streaming
        metadata = handler_call_details.invocation_metadata

        @contextlib.asynccontextmanager
        async def around(context: Any) -> AsyncIterator[None]:
            async with self._gate.admit(method, session, context):
                if session or not tracing.enabled():
                    yield
                else:
                    with tracing.server_span(method, metadata, context):
                        yield

        return _wrap(handler, around)


def _wrap(handler: Any, around: Callable[[Any], contextlib.AbstractAsyncContextManager[None]]) -> Any:
    """The same handler inside `around`. Streams are written from here, so that a cancellation always lands here."""
    if handler.response_streaming:
        inner: Handler = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def stream(request: Any, context: Any) -> None:
            async with around(context):
                answers = inner(_sound(request), context)
                if inspect.isawaitable(answers):
                    await answers
                    return
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        await context.write(answer)

        wrapped: Handler = stream
    else:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def unary(request: Any, context: Any) -> Any:
            async with around(context):
                return await inner(_sound(request), context)

        wrapped = unary

    make: Callable[..., Any] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(
        wrapped,
        request_deserializer=_deserializer(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )


def _deserializer(inner: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """As `inner`, but what cannot be read is handed on as the error that it deserves: raised there, it would end the
    call with a status of no type."""
    if inner is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return inner(data)
        except DecodeError:
            size = len(data)
            return InvalidRequest(f"{size} bytes came that are no message of this call", field="message", value=size)

    return read


def _sound(request: Any) -> Any:
    """The message, or the stream of messages; raises the error that stands in the place of one."""
    if isinstance(request, InvalidRequest):
        raise request
    return _sound_ones(request) if isinstance(request, AsyncIterator) else request


async def _sound_ones(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _sound(request)


def draining() -> Away:
    """What a new call gets from a server that is going away."""
    return Away("this server is draining: call another one, or again in a moment", retry_after_us=1_000_000)


def grace_over(grace_s: float) -> Away:
    """What a running call gets when the grace period is over."""
    return Away(
        f"this server stops: the call did not end within {grace_s:g} s",
        field="grace_s",
        limit=f"{grace_s:g}",
        retry_after_us=1_000_000,
    )


def _unexpected(method: str, error: Exception) -> JitneyError:
    error_id = secrets.token_hex(6)
    logs.get("server").error("unexpected error", method=method, error_id=error_id, exc_info=error)
    return JitneyError(f"internal error {error_id}: the log of the server says more", value=error_id)
