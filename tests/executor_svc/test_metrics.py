"""Metrics as Prometheus reads them."""

from __future__ import annotations

import socket
from dataclasses import replace
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from executor_svc.engine import EngineStatus
from executor_svc.metrics import ExecutorMetrics, MetricsServer
from executor_svc.model_info import ModelInfo
from jitney.errors import Conflict
from jitney.snapshot import Blocks, Outcome, PolicyChoice
from tests.support.ports import free_ports

STATUS = EngineStatus(
    executor="executor-0",
    incarnation=1,
    step=10,
    num_running=3,
    num_waiting=4,
    blocks=Blocks(total=100, free=20, evictable=30, leaving=0, granted=0),
    scheduler_connected=True,
    cache_connected=True,
    decisions=9,
    coasted_steps=1,
    preemptions=2,
    outcomes={Outcome.STOP: 5, Outcome.REFUSED: 6},
    prompt_tokens=70,
    cached_tokens=30,
    generated_tokens=80,
    waiting_reasons=(),
    history=(),
    policy=PolicyChoice(),
    not_ready="",
    scheduler_build="b",
    cache_reopenings=0,
    decide_us_p50=0,
    decide_us_p99=0,
)


def info() -> ModelInfo:
    return ModelInfo(
        name="tiny",
        version="0123456789abcdef0123",
        fingerprint=b"f",
        fingerprint_text="f",
        context_tokens=512,
        vocabulary=100,
        block_tokens=16,
        pool_blocks=100,
        block_bytes=64,
        backend="cpu (native)",
        arithmetic="fp16",
        bit_invariant=True,
        row_multiple=1,
    )


def scraped(port: int) -> dict[str, float]:
    """Values by name, with the labels but the model's where there are others."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[sample.name + "".join(f" {key}={value}" for key, value in sorted(labels.items()))] = sample.value
    return found


def test_what_is_scraped_is_what_is_so_now() -> None:
    now = [STATUS]
    (port,) = free_ports(1)
    server = MetricsServer(ExecutorMetrics(lambda: now[0], info()), "127.0.0.1", port)
    try:
        found = scraped(port)
        assert found["jitney_info backend=cpu (native) model_version=0123456789abcdef"] == 1
        assert found["jitney_ready"] == 1
        assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (3, 4)
        assert found["vllm:kv_cache_usage_perc"] == 0.5
        assert found["vllm:num_preemptions_total"] == 2
        assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == (100, 30)
        assert (found["vllm:prompt_tokens_total"], found["vllm:generation_tokens_total"]) == (70, 80)
        assert found["vllm:request_success_total finished_reason=stop"] == 5
        assert found["vllm:request_success_total finished_reason=length"] == 0
        assert (found["jitney_decisions_total"], found["jitney_coasted_steps_total"]) == (9, 1)
        now[0] = replace(STATUS, num_running=0, not_ready="draining")
        found = scraped(port)
        assert (found["jitney_ready"], found["vllm:num_requests_running"]) == (0, 0)
    finally:
        server.close()
    with pytest.raises(OSError):
        scraped(port)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=f"cannot serve metrics on 127.0.0.1:{port}") as raised:
            MetricsServer(ExecutorMetrics(lambda: STATUS, info()), "127.0.0.1", port)
        assert raised.value.field == "metrics_port"
