"""The half of tracing that needs OpenTelemetry: imported only where a collector is configured."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio
import xxhash
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jitney.errors import JitneyError
from jitney.serving import status
from jitney.serving.tracing import Attribute

StepId = tuple[str, int, int]
# Codes that mean the server failed; others are the caller's doing (OpenTelemetry conventions for gRPC servers).
_SERVER_FAULTS: Final = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class Otel:
    """Tracer, exporter and interceptors of one process."""

    def __init__(self, service: str, endpoint: str, ratio: float) -> None:
        self._ids = _Ids()
        self._sampler = TraceIdRatioBased(ratio)
        resource = Resource.create({"service.name": f"jitney-{service}", "service.namespace": "jitney"})
        self._provider = TracerProvider(
            resource=resource, sampler=ParentBased(self._sampler), id_generator=self._ids, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"), timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("jitney")

    def shutdown(self) -> None:
        """Exports what is left."""
        self._provider.force_flush(5_000)
        self._provider.shutdown()

    def span(self, name: str, links: Sequence[object], attributes: Mapping[str, Attribute]) -> OtelSpan:
        """A child of the current span."""
        return OtelSpan(self._tracer.start_span(name, attributes=_named(attributes), links=_links(links)))

    def step(
        self, name: str, step: StepId, root: bool, links: Sequence[object], attributes: Mapping[str, Attribute]
    ) -> OtelSpan | None:
        """A span in the trace of a step; None if it is not sampled."""
        parent = self.step_context(step)
        if parent is None:
            return None
        named = _named(attributes) | {
            "jitney.executor": step[0],
            "jitney.incarnation": step[1],
            "jitney.step": step[2],
        }
        if root:
            with self._ids.next(parent.trace_id, parent.span_id):
                started = self._tracer.start_span(
                    name, context=otel_context.Context(), attributes=named, links=_links(links)
                )
        else:
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent), otel_context.Context())
            started = self._tracer.start_span(name, context=context, attributes=named, links=_links(links))
        return OtelSpan(started)

    def step_context(self, step: StepId) -> SpanContext | None:
        """Ids of the root span of a step, the same in every service; None if it is not sampled."""
        name = f"{step[0]}\0{step[1]}\0{step[2]}".encode()
        trace_id = xxhash.xxh3_128_intdigest(name) or 1
        if trace_id & ((1 << 64) - 1) >= self._sampler.bound:
            return None
        span_id = xxhash.xxh3_64_intdigest(name, seed=1) or 1
        return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def current(self) -> SpanContext | None:
        """Context of the current span."""
        context = trace.get_current_span().get_span_context()
        return context if context.is_valid else None

    def inject(self) -> list[tuple[str, str]]:
        """The current trace context as metadata."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier)
        return list(carrier.items())

    @contextlib.contextmanager
    def server_span(self, method: str, metadata: Sequence[tuple[str, Any]], context: Any) -> Iterator[None]:
        """Around one call. The status that the call ended with decides the span's."""
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        parent = _PROPAGATOR.extract(carrier)
        started = self._tracer.start_span(
            method.lstrip("/"), context=parent, kind=SpanKind.SERVER, attributes=_rpc(method)
        )
        token = otel_context.attach(trace.set_span_in_context(started, parent))
        code = "OK"
        try:
            yield
        except BaseException as error:
            code = _code(error)
            raise
        finally:
            started.set_attribute("rpc.response.status_code", code)
            if code in _SERVER_FAULTS:
                started.set_attribute("error.type", code)
                started.set_status(StatusCode.ERROR)
            otel_context.detach(token)
            started.end()

    def client_interceptors(self) -> list[grpc.aio.ClientInterceptor]:
        """Unary answers and streamed answers; sessions (bidirectional streams) have no span."""
        return [_UnaryClient(self._tracer), _StreamClient(self._tracer)]


class OtelSpan:
    """A span; as a `with` block it is the current one inside."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._token: Any = None

    def __enter__(self) -> Self:
        self._token = otel_context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_: TracebackType | None
    ) -> None:
        otel_context.detach(self._token)
        if error is not None and not isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(StatusCode.ERROR, str(error)[:256])
        self._span.end()

    @property
    def context(self) -> SpanContext:
        """Its ids."""
        return self._span.get_span_context()

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes, named jitney.*."""
        self._span.set_attributes(_named(attributes))

    def link(self, context: object) -> None:
        """Links to another span."""
        if isinstance(context, SpanContext):
            self._span.add_link(context)

    def end(self) -> None:
        """Ends it."""
        self._span.end()


class _Ids(RandomIdGenerator):
    """Random ids, except where the next ones are given."""

    def __init__(self) -> None:
        self._given = threading.local()

    @contextlib.contextmanager
    def next(self, trace_id: int, span_id: int) -> Iterator[None]:
        """Inside, spans get these ids."""
        self._given.ids = (trace_id, span_id)
        try:
            yield
        finally:
            self._given.ids = None

    def generate_trace_id(self) -> int:
        """128 bits."""
        ids = getattr(self._given, "ids", None)
        return ids[0] if ids else super().generate_trace_id()

    def generate_span_id(self) -> int:
        """64 bits."""
        ids = getattr(self._given, "ids", None)
        return ids[1] if ids else super().generate_span_id()


class _Client:
    """A span from the start of a call until it is done, however it ends."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._finishing: set[asyncio.Task[None]] = set()

    async def call(self, continuation: Callable[..., Any], details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        """Starts the call with the span's context in its metadata."""
        raw: Any = details.method
        method = raw.decode() if isinstance(raw, bytes) else str(raw)
        started = self._tracer.start_span(method.lstrip("/"), kind=SpanKind.CLIENT, attributes=_rpc(method))
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(started))
        pairs = [*(details.metadata or ()), *carrier.items()]
        sent = details._replace(metadata=grpc.aio.Metadata(*pairs))  # type: ignore[attr-defined]
        try:
            call = await continuation(sent, request)
        except BaseException as error:
            started.set_attribute("error.type", type(error).__name__)
            started.set_status(StatusCode.ERROR)
            started.end()
            raise
        call.add_done_callback(lambda done: self._done(started, done))
        return call

    def _done(self, span: trace.Span, call: Any) -> None:
        task = asyncio.ensure_future(_finish(span, call))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)


class _UnaryClient(_Client, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        """Around one call."""
        return await self.call(continuation, client_call_details, request)


class _StreamClient(_Client, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        """Around one call."""
        return await self.call(continuation, client_call_details, request)


async def _finish(span: trace.Span, call: Any) -> None:
    code = await call.code()
    span.set_attribute("rpc.response.status_code", code.name)
    if code is not grpc.StatusCode.OK:
        span.set_status(StatusCode.ERROR, code.name)
        span.set_attribute("error.type", code.name)
    span.end()


def _code(error: BaseException) -> str:
    """The status that a call ends with which raises this."""
    if isinstance(error, JitneyError):
        return status.CODES[status.kind_of(error)].name
    return "CANCELLED" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "INTERNAL"


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"jitney.{name}": value for name, value in attributes.items()}


def _links(contexts: Sequence[object]) -> list[Link]:
    return [Link(context) for context in contexts if isinstance(context, SpanContext)]


def _rpc(method: str) -> dict[str, Attribute]:
    return {"rpc.system.name": "grpc", "rpc.method": method.lstrip("/")}
