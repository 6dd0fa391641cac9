"""Traces, if a collector is configured; else nothing is imported, built or sent.

A request's trace begins with the caller (W3C trace context in the metadata). A step has a trace of its own, whose ids
follow from (executor, incarnation, step): each of the three services derives them alone, so that spans of one step
meet in one trace although snapshots and batches travel on long-lived streams and carry no trace context, and all
three agree on which steps are sampled. Request and step are linked to each other.

    with tracing.span("tokenize", tokens=12):
        ...
    with tracing.step("decide", "executor-0", incarnation, step) as span:
        span.set(rows=32)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import grpc.aio

    from jitney.serving.otel import Otel

Attribute = str | bool | int | float

_otel: Otel | None = None


class Span(Protocol):
    """A running span; ends with its `with` block, or with `end`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes."""

    def link(self, context: object) -> None:
        """Links the span to another one's `context`."""

    @property
    def context(self) -> object:
        """What `link` and `links` take; None when not traced."""

    def end(self) -> None:
        """Ends it, for spans that are not a `with` block."""


class _Off:
    """A span that nobody records."""

    context = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def set(self, **attributes: Attribute) -> None:
        pass

    def link(self, context: object) -> None:
        pass

    def end(self) -> None:
        pass


OFF: Span = _Off()


def configure(service: str, endpoint: str, ratio: float = 1.0) -> None:
    """Sets tracing up for this process. An empty endpoint turns it off; "http://host:port" is OTLP over plain gRPC."""
    global _otel
    shutdown()
    if endpoint:
        from jitney.serving.otel import Otel

        _otel = Otel(service, endpoint, ratio)


def shutdown() -> None:
    """Sends what is left and turns tracing off."""
    global _otel
    if _otel is not None:
        _otel.shutdown()
        _otel = None


def enabled() -> bool:
    """Whether spans go anywhere."""
    return _otel is not None


def span(name: str, *, links: Sequence[object] = (), **attributes: Attribute) -> Span:
    """A child of the current span. As a `with` block it is the current one inside."""
    return OFF if _otel is None else _otel.span(name, links, attributes)


def step(
    name: str,
    executor: str,
    incarnation: int,
    number: int,
    *,
    root: bool = False,
    links: Sequence[object] = (),
    **attributes: Attribute,
) -> Span:
    """A span of one step's trace. The executor opens the `root`, all others are its children."""
    if _otel is None:
        return OFF
    return _otel.step(name, (executor, incarnation, number), root, links, attributes) or OFF


def step_context(executor: str, incarnation: int, number: int) -> object:
    """What a request's span links to; None when the step is not traced."""
    return None if _otel is None else _otel.step_context((executor, incarnation, number))


def current() -> object:
    """Context of the current span, for links; None when there is none."""
    return None if _otel is None else _otel.current()


@contextlib.contextmanager
def server_span(method: str, metadata: Sequence[tuple[str, Any]] | None, context: Any) -> Iterator[None]:
    """Around a call that a server answers; the caller's trace goes on."""
    if _otel is None:
        yield
        return
    with _otel.server_span(method, metadata or (), context):
        yield


def client_interceptors() -> list[grpc.aio.ClientInterceptor]:
    """For a channel: spans around calls, and the trace context in their metadata."""
    return [] if _otel is None else _otel.client_interceptors()


def inject(metadata: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Metadata with the current trace context, for calls without the interceptors."""
    pairs = list((metadata or {}).items())
    return pairs if _otel is None else pairs + _otel.inject()
