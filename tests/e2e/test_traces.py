"""The traces of a request and of its steps, from the client through all three real services."""

from __future__ import annotations

import asyncio
from pathlib import Path

from jitney.client import AsyncClient, Options
from jitney.serving import tracing
from jitney.supervisor import ServeOptions, Supervisor
from tests.support.otlp_receiver import attributes, otlp_receiver
from tests.support.tiny_llama import make_tiny_llama

FLAGS = ("--pool-blocks=64", "--threads=1", "--max-step-tokens=256", "--native=false", "--horizon=steps")
"""A decision for every step, so that all three services meet in one."""


async def ask(target: str) -> None:
    async with AsyncClient(target) as client:
        with tracing.span("question"):
            completion = await client.generate_once("one two three", Options(max_tokens=6, ignore_eos=True))
        assert len(completion.token_ids) == 6


def test_a_request_and_its_steps_meet(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    with otlp_receiver() as received:
        endpoint = f"--otlp-endpoint={received.endpoint}"
        options = ServeOptions(
            state_dir=tmp_path / "state",
            executor_args=(f"--model={model}", *FLAGS, endpoint),
            scheduler_args=(endpoint,),
            cache_args=(endpoint,),
        )
        with Supervisor(options) as services:
            tracing.configure("client", received.endpoint)
            try:
                asyncio.run(ask(services.executor_target))
            finally:
                tracing.shutdown()

        (question,) = received.wait_for("question")
        (request,) = received.wait_for("request")
        assert request.trace_id == question.trace_id
        assert received.services(question.trace_id) == {"jitney-client", "jitney-executor"}
        assert attributes(request)["jitney.generated_tokens"] == 6

        steps = received.wait_for("step", 6)
        (first,) = (step for step in steps if step.links)
        assert [(link.trace_id, link.span_id) for link in request.links] == [(first.trace_id, first.span_id)]
        assert [(link.trace_id, link.span_id) for link in first.links] == [(request.trace_id, request.span_id)]
        assert received.services(first.trace_id) >= {"jitney-executor", "jitney-scheduler"}

        roots = {step.trace_id: step for step in steps}
        for name in ("decide", "apply"):
            found = [span for span in received.named(name) if span.trace_id in roots]
            assert found
            for span in found:
                assert span.parent_span_id == roots[span.trace_id].span_id
        everybody = {"jitney-executor", "jitney-scheduler", "jitney-cache"}
        assert any(received.services(trace_id) == everybody for trace_id in roots)
