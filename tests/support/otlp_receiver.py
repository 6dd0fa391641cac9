"""A trace collector for tests: takes OTLP over gRPC and keeps the spans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.processes import wait_until


@dataclass
class Received:
    """The spans, by service."""

    endpoint: str = ""
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def named(self, name: str) -> list[Span]:
        """Spans of that name."""
        return [span for _, span in list(self.spans) if span.name == name]

    def services(self, trace_id: bytes) -> set[str]:
        """Names of the services that have a span in a trace."""
        return {service for service, span in list(self.spans) if span.trace_id == trace_id}

    def wait_for(self, name: str, count: int = 1, timeout_s: float = 20.0) -> list[Span]:
        """Waits until so many spans of a name have come."""
        wait_until(lambda: len(self.named(name)) >= count, timeout_s)
        return self.named(name)


def attributes(span: Span) -> dict[str, object]:
    """Of a span, as plain values."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in span.attributes}


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:
        """Keeps what comes."""
        for resource in request.resource_spans:
            names = [pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"]
            for scope in resource.scope_spans:
                self._received.spans.extend((names[0], span) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def otlp_receiver() -> Iterator[Received]:
    """A running collector on a free port."""
    received = Received()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Collector(received), server)
    received.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()
