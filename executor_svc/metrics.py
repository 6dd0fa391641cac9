"""What Prometheus scrapes: the counters of GetStatus, under vLLM's names where it has them, which routers and
dashboards read already; what only Jitney has is `jitney_...`. Read when it is scraped; nothing is kept beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from executor_svc.engine import EngineStatus
from executor_svc.model_info import ModelInfo
from jitney.errors import Conflict
from jitney.snapshot import Outcome

LABELS = ("model_name",)


class ExecutorMetrics(Collector):
    """Of one executor; `status` may be called from any thread."""

    def __init__(self, status: Callable[[], EngineStatus], info: ModelInfo) -> None:
        self._status = status
        self._info = info

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        status, info = self._status(), self._info
        blocks = status.blocks
        used = 1 - (blocks.free + blocks.evictable) / max(1, blocks.total)
        yield InfoMetricFamily(
            "jitney",
            "Attention backend and model, as they were chosen at start",
            value={"backend": info.backend, "model_name": info.name, "model_version": info.version[:16]},
        )
        yield self._gauge("jitney_ready", "1: the executor takes requests", float(not status.not_ready))
        yield self._gauge("vllm:num_requests_running", "Rows of the running batch", status.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait", status.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1", used)
        yield self._counter("vllm:num_preemptions", "Preemptions", status.preemptions)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens computed, recomputing included", status.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated", status.generated_tokens)
        queried = status.prompt_tokens + status.cached_tokens
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens, computed or found", queried)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache", status.cached_tokens)
        ended = CounterMetricFamily("vllm:request_success", "Requests that ended", labels=(*LABELS, "finished_reason"))
        for outcome in (Outcome.STOP, Outcome.LENGTH, Outcome.ABORTED, Outcome.DEADLINE, Outcome.ERROR):
            ended.add_metric((info.name, outcome.name.lower()), status.outcomes.get(outcome, 0))
        yield ended
        yield self._counter("jitney_decisions", "Decisions of schedulers that were followed", status.decisions)
        yield self._counter("jitney_coasted_steps", "Steps without a decision", status.coasted_steps)
        yield self._counter("jitney_cache_reopenings", "Times that the cache was opened anew", status.cache_reopenings)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric((self._info.name,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric((self._info.name,), value)
        return family


class MetricsServer:
    """Serves them over HTTP, from threads of its own. Raises Conflict if the address cannot be had."""

    def __init__(self, metrics: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(metrics)
        self._server: WSGIServer
        self._thread: Thread
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            what = f"cannot serve metrics on {host}:{port}: {error.strerror or error}"
            raise Conflict(what, field="metrics_port", value=port) from error

    def close(self) -> None:
        """Ends it; blocks for up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
