"""Traces: nothing without a collector; with one, a request's spans and a step's spans meet across processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from jitney.executor.v1 import executor_pb2 as pb
from jitney.executor.v1 import executor_pb2_grpc
from jitney.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from jitney.serving import channels, tracing
from tests.support.otlp_receiver import Received, attributes, otlp_receiver
from tests.support.processes import service

TINY = "tests.support.tiny_service"
GENERATE = "jitney.executor.v1.Executor/Generate"
ABORT = "jitney.executor.v1.Executor/Abort"


@pytest.fixture
def collector() -> Iterator[Received]:
    with otlp_receiver() as received:
        try:
            yield received
        finally:
            tracing.shutdown()


def call(target: str, body: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with channels.channel(target) as link:
            await body(link)
            await asyncio.sleep(0.05)

    asyncio.run(main())


def test_off_imports_nothing_and_costs_nothing() -> None:
    code = (
        "import sys\n"
        "from jitney.serving import channels, server, tracing\n"
        "tracing.configure('x', '')\n"
        "assert tracing.span('a', rows=3) is tracing.span('b') is tracing.step('c', 'e', 1, 2)\n"
        "with tracing.span('a') as span:\n"
        "    span.set(rows=2)\n"
        "    span.link(tracing.step_context('e', 1, 2))\n"
        "assert tracing.client_interceptors() == []\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path.cwd())


def test_spans_of_a_request_meet_in_one_trace(collector: Received, tmp_path: Path) -> None:
    async def body(link: Any) -> None:
        stub = executor_pb2_grpc.ExecutorStub(link)
        with tracing.span("question", tenant="a"):
            events = [event async for event in stub.Generate(pb.GenerateRequest(max_tokens=2))]
        assert len(events) == 2

    tracing.configure("client", collector.endpoint)
    with service(TINY, f"--otlp-endpoint={collector.endpoint}", folder=tmp_path) as process:
        call(process.target, body)
        tracing.shutdown()
        process.end(10.0)
    (root,) = collector.wait_for("question")
    assert attributes(root)["jitney.tenant"] == "a"
    client, server = collector.wait_for(GENERATE, 2)
    if client.kind != client.SPAN_KIND_CLIENT:
        client, server = server, client
    assert client.parent_span_id == root.span_id
    assert server.parent_span_id == client.span_id
    assert attributes(client)["rpc.response.status_code"] == "OK"
    for delta in collector.wait_for("delta", 2):
        assert (delta.trace_id, delta.parent_span_id) == (root.trace_id, server.span_id)
    assert collector.services(root.trace_id) == {"jitney-client", "jitney-tiny"}


def test_a_stream_that_its_client_cancels_is_exported(collector: Received, tmp_path: Path) -> None:
    async def body(link: Any) -> None:
        stream = executor_pb2_grpc.ExecutorStub(link).Generate(pb.GenerateRequest(max_tokens=10_000))
        await stream.read()
        stream.cancel()

    tracing.configure("client", collector.endpoint)
    with service(TINY, f"--otlp-endpoint={collector.endpoint}", folder=tmp_path) as process:
        call(process.target, body)
        tracing.shutdown()
        process.end(10.0)
    for span in collector.wait_for(GENERATE, 2):
        assert attributes(span)["rpc.response.status_code"] == "CANCELLED"


def test_errors_show_on_the_side_whose_fault_they_are(collector: Received, tmp_path: Path) -> None:
    async def body(link: Any) -> None:
        stub = executor_pb2_grpc.ExecutorStub(link)
        for name in ("invalid", "bug"):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Abort(pb.AbortRequest(request_id=name))

    tracing.configure("client", collector.endpoint)
    with service(TINY, f"--otlp-endpoint={collector.endpoint}", folder=tmp_path) as process:
        call(process.target, body)
        tracing.shutdown()
        process.end(10.0)
    spans = collector.wait_for(ABORT, 4)
    seen = {
        (span.kind == span.SPAN_KIND_CLIENT, attributes(span)["rpc.response.status_code"], span.status.code)
        for span in spans
    }
    unset, error = spans[0].status.STATUS_CODE_UNSET, spans[0].status.STATUS_CODE_ERROR
    assert seen == {
        (True, "INVALID_ARGUMENT", error),
        (False, "INVALID_ARGUMENT", unset),
        (True, "INTERNAL", error),
        (False, "INTERNAL", error),
    }


def test_a_step_is_one_trace_in_all_services(collector: Received, tmp_path: Path) -> None:
    async def body(link: Any) -> None:
        session = scheduler_pb2_grpc.SchedulerStub(link).Decide()
        for number in (1, 2):
            with tracing.step("step", "executor-0", 99, number, root=True, rows=4) as span:
                with tracing.span("launch"):
                    pass
                await session.write(scheduler_pb2.Snapshot(executor="executor-0", incarnation=99, step=number))
                await session.read()
                span.set(tokens=7)
        await session.done_writing()

    tracing.configure("executor", collector.endpoint)
    with tracing.span("request") as request:
        request.link(tracing.step_context("executor-0", 99, 1))
    with service(TINY, f"--otlp-endpoint={collector.endpoint}", folder=tmp_path) as process:
        call(process.target, body)
        tracing.shutdown()
        process.end(10.0)
    steps, decides = collector.wait_for("step", 2), collector.wait_for("decide", 2)
    assert len({step.trace_id for step in steps}) == 2
    for step, decide, launch in zip(steps, decides, collector.wait_for("launch", 2), strict=True):
        assert not step.parent_span_id
        assert (decide.trace_id, decide.parent_span_id) == (step.trace_id, step.span_id)
        assert (launch.trace_id, launch.parent_span_id) == (step.trace_id, step.span_id)
        assert collector.services(step.trace_id) == {"jitney-executor", "jitney-tiny"}
        assert attributes(step)["jitney.tokens"] == 7
        assert attributes(decide)["jitney.step"] == attributes(step)["jitney.step"]
    (linked,) = collector.wait_for("request")
    assert [(link.trace_id, link.span_id) for link in linked.links] == [(steps[0].trace_id, steps[0].span_id)]


def test_all_services_agree_on_which_steps_are_sampled(collector: Received) -> None:
    def sampled() -> list[bool]:
        return [tracing.step_context("executor-0", 5, number) is not None for number in range(400)]

    tracing.configure("a", collector.endpoint, 0.25)
    first = sampled()
    tracing.configure("b", collector.endpoint, 0.25)
    assert sampled() == first
    assert 50 < sum(first) < 150
    unsampled = first.index(False)
    assert tracing.step("step", "executor-0", 5, unsampled) is tracing.OFF


def test_a_collector_that_is_not_there_harms_nothing(tmp_path: Path) -> None:
    async def body(link: Any) -> None:
        stub = executor_pb2_grpc.ExecutorStub(link)
        assert await stub.Abort(pb.AbortRequest(request_id="fine")) == pb.AbortResponse()

    with service(TINY, "--otlp-endpoint=http://127.0.0.1:1", folder=tmp_path) as process:
        call(process.target, body)
        assert process.end(30.0) == 0
