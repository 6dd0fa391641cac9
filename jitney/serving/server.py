"""A service's gRPC server: built from its configuration, served until a signal, drained without cutting anybody off.

    config = load_or_exit(SchedulerConfig, "scheduler")

    async def main() -> int:
        server = build_server(config, "scheduler")
        add_SchedulerServicer_to_server(Servicer(), server.grpc)
        server.offer("jitney.scheduler.v1.Scheduler")
        return await serve_until_signal(server)

    sys.exit(run(main()))

Life: listening (NOT_SERVING) -> `prepare` done: SERVING -> SIGTERM or SIGINT: draining (NOT_SERVING; new calls get
UNAVAILABLE, sessions end, running calls go on) -> all ended, or the grace period is over (the rest get a typed
UNAVAILABLE) -> exit status 0. A second signal ends the process at once. The health service named "live" says SERVING
from start to end: it tells a process that works from one that is stuck, whether or not it is ready.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jitney.errors import Conflict, JitneyError
from jitney.serving import calls, config, logs, tracing
from jitney.serving.config import ServingConfig

LIVE: Final = "live"
_AGE_GRACE_MS: Final = 10_000
_LAST_WORDS_S: Final = 2.0
_SECOND_SIGNAL_S: Final = 0.3  # Sooner it is an echo of the first: the kernel may say twice that a parent died.

Hook = Callable[[], Awaitable[None]]


class ServiceServer:
    """A grpc.aio server with its gate, its health and its configuration. Add servicers to `grpc`, then `offer` them."""

    def __init__(self, settings: ServingConfig, service: str, server: grpc.aio.Server, gate: calls.Gate) -> None:
        self.config = settings
        self.service = service
        self.grpc = server
        self.gate = gate
        self.port = 0
        self._names: list[str] = []
        self._health = health.aio.HealthServicer()
        self._stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._stop_asked = 0.0
        self._draining = False
        self._reason = "starting"
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    @property
    def address(self) -> str:
        """host:port, once started."""
        return f"{self.config.host}:{self.port}"

    @property
    def not_serving(self) -> str:
        """Why readiness is off; empty: it is on."""
        return self._reason

    def offer(self, *names: str) -> None:
        """Full names of the gRPC services that were added, for health and reflection."""
        self._names.extend(names)

    async def start(self) -> None:
        """Binds the port and listens, NOT_SERVING. Raises Conflict if the address cannot be had."""
        reflected = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(reflected, self.grpc)
        await self.set_serving("starting")
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        wanted = f"{self.config.host}:{self.config.port}"
        try:
            if self.config.tls_cert is not None and self.config.tls_key is not None:
                pair = (self.config.tls_key.read_bytes(), self.config.tls_cert.read_bytes())
                self.port = self.grpc.add_secure_port(wanted, grpc.ssl_server_credentials([pair]))
            else:
                self.port = self.grpc.add_insecure_port(wanted)
        except (RuntimeError, OSError) as error:
            said = str(error).partition("; set GRPC_VERBOSITY")[0]
            raise Conflict(f"cannot listen on {wanted}: {said}", field="port", value=wanted) from error
        await self.grpc.start()
        if self.config.port_file is not None:
            _write_atomically(self.config.port_file, f"{self.port}\n")

    async def set_serving(self, reason: str = "") -> None:
        """Readiness: on with no reason, else off. While draining it stays off."""
        if self._draining:
            return
        self._reason = reason
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, not_serving if reason else serving)

    def request_stop(self, reason: str, exit_code: int = 0) -> None:
        """Drains and stops as a signal would; from any thread."""
        self._loop.call_soon_threadsafe(self._request_stop, reason, exit_code)

    def stopping_for_s(self) -> float:
        """Seconds since the server was first asked to stop; 0 if it was not."""
        return self._loop.time() - self._stop_asked if self._stop.done() else 0.0

    def _request_stop(self, reason: str, exit_code: int) -> None:
        if not self._stop.done():
            self._stop_asked = self._loop.time()
            logs.get("server").info("stopping", reason=reason)
            self._stop.set_result(exit_code)

    async def stopped(self) -> int:
        """Waits until somebody asks the server to stop; the exit status that was asked for."""
        return await asyncio.shield(self._stop)

    async def drain(self) -> None:
        """Turns readiness off and new calls away, ends sessions, and lets running calls end within the grace."""
        await self.set_serving("draining")
        self._draining = True
        self.gate.close(calls.draining())
        log = logs.get("server")
        if self.gate.running:
            log.info("draining", running=self.gate.running, grace_s=self.config.grace_s)
        if not await self.gate.wait_idle(self.config.grace_s):
            log.warning("grace period is over", running=self.gate.running)
            self.gate.end(calls.grace_over(self.config.grace_s))
            await self.gate.wait_idle(_LAST_WORDS_S)

    async def close(self) -> None:
        """Closes the port; what still runs is cut off."""
        await self.grpc.stop(0.1)


def build_server(settings: ServingConfig, service: str) -> ServiceServer:
    """A server in the running event loop, with logs and tracing set up for the process. Does not listen yet."""
    logs.configure(service, settings.log_level, settings.log_format)
    tracing.configure(service, settings.otlp_endpoint, settings.trace_ratio)
    log = logs.get("server")
    log.info("configuration", digest=config.digest(settings), settings=config.describe(settings))
    if unknown := config.unknown_variables(type(settings), service):
        log.warning("variables that name no setting", variables=unknown)
    gate = calls.Gate()
    server = grpc.aio.server(interceptors=[calls.CallInterceptor(gate)], options=_options(settings))
    return ServiceServer(settings, service, server, gate)


async def serve_until_signal(
    server: ServiceServer,
    *,
    prepare: Hook | None = None,
    on_drain: Hook | None = None,
    on_stop: Hook | None = None,
) -> int:
    """Serves; returns the exit status.

    `prepare` runs while the server already listens, NOT_SERVING; a JitneyError of it ends the process with one line
    and status 1. `on_drain` runs when draining begins, `on_stop` when no call runs any more (also after a failure).
    """
    loop, log = asyncio.get_running_loop(), logs.get("server")
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, server, number)
    try:
        await server.start()
        log.info("listening", address=server.address)
        code = await _prepare(server, prepare)
        if code is None:
            gc.collect()
            gc.freeze()  # what the imports have left is looked through no more
            await server.set_serving()
            log.info("ready", address=server.address)
            code = await server.stopped()
        if on_drain is not None:
            await on_drain()
        await server.drain()
    except JitneyError as error:
        log.error("cannot start", error=error.message)
        code = 1
    finally:
        if on_stop is not None:
            await on_stop()
        await server.close()
        if server.config.port_file is not None:
            server.config.port_file.unlink(missing_ok=True)
        tracing.shutdown()
    log.info("stopped", exit_code=code)
    return code


def run(main: Coroutine[Any, Any, int]) -> int:
    """Runs a service's main coroutine on uvloop; returns its exit status.

    Threads that still compute (a model being loaded) do not hold up the end of the process.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        code = runner.run(main)
        if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
            loop.stop()
            _exit_now(code)
    return code


async def _prepare(server: ServiceServer, prepare: Hook | None) -> int | None:
    """Runs `prepare`, unless somebody stops the server meanwhile; then the exit status."""
    if prepare is None:
        return None
    work = asyncio.ensure_future(prepare())
    stop = asyncio.ensure_future(server.stopped())
    try:
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return None
        return stop.result()
    finally:
        for task in (work, stop):
            task.cancel()


def _on_signal(server: ServiceServer, number: signal.Signals) -> None:
    if server.stopping_for_s() > _SECOND_SIGNAL_S:
        logs.get("server").warning("second signal: ending at once", signal=number.name)
        _exit_now(128 + number)
    server.request_stop(number.name)


def _exit_now(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _options(settings: ServingConfig) -> list[tuple[str, Any]]:
    """Long silences are normal (a stream may wait for hours), a dead peer is found within two minutes."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.so_reuseport", 0),  # A port that another server has is an error, not shared.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
    ]
    if settings.max_connection_age_s > 0:
        options.append(("grpc.max_connection_age_ms", int(settings.max_connection_age_s * 1000)))
        options.append(("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS))
    return options


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text, encoding="ascii")
    part.replace(path)
