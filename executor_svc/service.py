"""One executor process, put together: model, cache, schedulers, loop and server, in the order of their lives.

Starting: the server listens, NOT_SERVING; tokenizer and model are loaded on a thread; the cache is opened; the loop
starts; SERVING. Ending: the loop refuses what is new, calls end, the loop stops, cache and schedulers are let go.
Readiness follows the loop's watchdog; a loop that has failed ends the process, since its state is not to be trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from executor_svc import wire
from executor_svc.advice import SchedulerAdvice
from executor_svc.cache_client import CacheClient
from executor_svc.cache_pool import CachePool
from executor_svc.clock import MonotonicClock
from executor_svc.config import SERVICE, ExecutorConfig
from executor_svc.copies_choice import copies_for
from executor_svc.decision_log import DecisionRecorder
from executor_svc.door import Door
from executor_svc.engine import Engine
from executor_svc.hasher import HashWorker
from executor_svc.lock_file import LockFile
from executor_svc.loop import Loop, LoopSettings
from executor_svc.metrics import ExecutorMetrics, MetricsServer
from executor_svc.model.calibration import MOST_TOKENS, calibrate_cached
from executor_svc.model.device_model import DeviceModel
from executor_svc.model.model import CpuModel
from executor_svc.model.open_model import ModelOptions, open_model
from executor_svc.model.threads import use_threads
from executor_svc.model_info import ModelInfo
from executor_svc.model_runner import ModelRunner
from executor_svc.ports import Clock
from executor_svc.queued_runner import QueuedRunner
from executor_svc.rates import MeasuredRates
from executor_svc.scheduler_client import SchedulerClient
from executor_svc.server import ExecutorService, Parts
from executor_svc.situation import Identity, Policy
from executor_svc.tenants import Tenants, read_tenants
from executor_svc.tokenizer import Tokenizer, load_tokenizer
from executor_svc.traced_model import RequestSpans, StepSpans, TracedModel, TracedQueue
from jitney.errors import Away, Conflict, InvalidRequest
from jitney.executor.v1 import executor_pb2_grpc
from jitney.models import default_model_path
from jitney.serving import logs, tracing
from jitney.serving.config import cache_dir as default_cache_dir
from jitney.serving.config import default_shared_dir
from jitney.serving.server import ServiceServer, build_server, serve_until_signal

Model = CpuModel | DeviceModel
SERVICE_NAME = "jitney.executor.v1.Executor"
WATCH_S = 0.25
PROGRESS_STEP = 0.02
DEVICE_STEP_TOKENS = 256
SWITCH_S = 0.0001
"""The loop's thread lets the one that talks to schedulers and cache in after so long; 5 ms, the default, is a step."""


async def serve(config: ExecutorConfig) -> int:
    """Serves until a signal, or until the loop fails; returns the exit status."""
    server = build_server(config, SERVICE)
    executor = Executor(config, server)
    return await serve_until_signal(server, prepare=executor.prepare, on_drain=executor.drain, on_stop=executor.stop)


class Executor:
    """Holds the parts, from start to end. Belongs to the server's event loop."""

    def __init__(self, config: ExecutorConfig, server: ServiceServer) -> None:
        self._config = config
        self._server = server
        self._log = logs.get("executor")
        self._service = ExecutorService(config.limits(), config.cached_price_ppm)
        self._closing = contextlib.AsyncExitStack()  # what to end, last begun first
        self._engine: Engine | None = None
        self._recorder: DecisionRecorder | None = None
        self._spans: RequestSpans = {}
        self._incarnation = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
        executor_pb2_grpc.add_ExecutorServicer_to_server(self._service, server.grpc)
        server.offer(SERVICE_NAME)
        self._closing.callback(self._service.close)

    async def prepare(self) -> None:
        """Loads the model, opens the cache, starts the loop. Raises JitneyError, in one sentence."""
        sys.setswitchinterval(SWITCH_S)
        tenants = read_tenants(self._config.tenants) if self._config.tenants is not None else Tenants()
        if self._config.decision_log is not None:
            self._recorder = DecisionRecorder(self._config.decision_log, self._config.decision_log_mib << 20)
            self._closing.push_async_callback(asyncio.to_thread, self._recorder.close)
        tokenizer, model, self._config = await asyncio.to_thread(load_model, self._config)
        info = model.info
        self._log.info("model", **_described(info))
        engine, scheduler, cache = await self._start_engine(model, info)
        advice = SchedulerAdvice(self._config.schedulers, engine.preview, self._config.scheduler_ca)
        self._closing.push_async_callback(advice.close)
        engine.loop.situation.tenants = tenants
        engine.loop.situation.shows_all = self._recorder is not None
        limits = self._config.limits()
        door = Door(tokenizer, info, limits, tenants)
        parts = Parts(engine, door, advice, wire.model_info(info, tokenizer, limits), cache, self._spans)
        scheduler.start()
        self._closing.push_async_callback(scheduler.close)
        engine.start()
        self._closing.push_async_callback(asyncio.to_thread, engine.stop)
        if self._config.metrics_port:
            metrics = MetricsServer(ExecutorMetrics(engine.status, info), self._config.host, self._config.metrics_port)
            self._closing.push_async_callback(asyncio.to_thread, metrics.close)
        self._engine = engine
        columns = asyncio.create_task(self._follow_policy(engine, advice))
        self._closing.callback(columns.cancel)
        watch = asyncio.create_task(self._watch(engine))
        self._closing.callback(watch.cancel)
        self._service.open(parts)

    async def drain(self) -> None:
        """Nothing new from here on."""
        if self._engine is not None:
            self._engine.drain()

    async def stop(self) -> None:
        """Ends everything that `prepare` began."""
        await self._closing.aclose()

    async def _start_engine(self, model: Model, info: ModelInfo) -> tuple[Engine, SchedulerClient, CacheClient]:
        """Opens the cache and builds the loop around it."""
        config, clock = self._config, MonotonicClock()
        lock = LockFile(
            (config.shared_dir or default_shared_dir()) / f"{SERVICE}-{self._incarnation}-{os.getpid()}.lock"
        )
        self._closing.callback(lock.close)
        pool = CachePool(
            executor=config.name,
            incarnation=self._incarnation,
            fingerprint=info.fingerprint,
            blocks=info.pool_blocks,
            block_bytes=info.block_bytes,
            block_tokens=info.block_tokens,
            lock_path=lock.path,
        )
        cache = CacheClient(config.cache, pool, clock)
        await cache.open(config.cache_timeout_s)
        self._closing.push_async_callback(cache.close)
        copies = copies_for(model.backend, clock, config.copy_mib_per_s << 20)
        self._closing.push_async_callback(asyncio.to_thread, copies.close)
        copies.attach(cache.segments)
        scheduler = SchedulerClient(
            config.schedulers,
            clock,
            asyncio.get_running_loop(),
            timeout_s=config.scheduler_timeout_s,
            rotate=config.rotate_schedulers,
            tls_ca=config.scheduler_ca,
            record=self._recorder.record if self._recorder is not None else None,
        )
        spans = StepSpans(config.name, self._incarnation, self._spans, lambda: loop.registry.running)
        runner = _runner(model, clock, spans)
        self._closing.push_async_callback(asyncio.to_thread, runner.close)
        hasher = HashWorker(clock, info.block_tokens)
        self._closing.push_async_callback(asyncio.to_thread, hasher.close)
        loop = Loop(
            Identity(config.name, self._incarnation),
            config.settings(info.context_tokens),
            LoopSettings(info.pool_blocks, coast_after_us=1000 * config.coast_after_ms, rests=config.rests),
            Policy(config.policy_choice()),
            clock=clock,
            rates=MeasuredRates(info.block_bytes),
            scheduler=scheduler,
            cache=cache,
            model=runner,
            hasher=hasher,
            copies=copies,
        )
        cache.state = loop.apply
        loop.apply.lower = cache.lower
        engine = Engine(
            loop,
            name=config.name,
            incarnation=self._incarnation,
            model_version=info.version,
            fingerprint=info.fingerprint,
        )
        return engine, scheduler, cache

    async def _follow_policy(self, engine: Engine, advice: SchedulerAdvice) -> None:
        """Sends what the configured policy reads and no more, as soon as a scheduler has said which they are."""
        choice = self._config.policy_choice()
        while True:
            try:
                reads = await advice.reads(choice.name)
            except Away:
                await asyncio.sleep(WATCH_S)
                continue
            if engine.loop.policy.choice == choice and reads is not None:
                await asyncio.to_thread(engine.set_policy, choice, reads)
            return

    async def _watch(self, engine: Engine) -> None:
        """Readiness follows the engine; a loop that has failed ends the process."""
        while True:
            await asyncio.sleep(WATCH_S)
            if engine.failure is not None:
                self._server.request_stop(engine.not_ready, exit_code=1)
                return
            reason = engine.not_ready
            if reason != self._server.not_serving:
                self._log.warning("readiness", not_ready=reason)
                await self._server.set_serving(reason)


def _runner(model: Model, clock: Clock, spans: StepSpans) -> ModelRunner | QueuedRunner[Any]:
    """Steps are recorded where a trace collector is configured."""
    traced = tracing.enabled()
    if isinstance(model, CpuModel):
        return ModelRunner(TracedModel(model, spans) if traced else model, clock, model.llama.begun)
    return QueuedRunner(TracedQueue(model, spans), clock) if traced else QueuedRunner(model, clock)


def load_model(config: ExecutorConfig) -> tuple[Tokenizer, Model, ExecutorConfig]:
    """With the sizes that were to be measured filled in. Tokenizer first: what is wrong with it is said before minutes
    of loading. Raises JitneyError, one sentence."""
    log = logs.get("executor")
    cache_dir = config.cache_dir or default_cache_dir()
    path = config.model or default_model_path(cache_dir)
    if config.model is None and not path.exists():
        what = f"the default model is not at {path}: run `jitney model fetch`, or give --model"
        raise InvalidRequest(what, field="model", value=path)
    threads = use_threads(config.threads)
    log.info("loading", stage="reading the tokenizer", fraction=0.0, model=str(path), threads=threads)
    tokenizer = load_tokenizer(path)
    options = ModelOptions(
        backend=config.backend,
        emulated=config.emulated,
        fixed_splits=config.fixed_splits,
        arithmetic=config.arithmetic,
        kv=config.kv,
        pool_blocks=config.pool_blocks,
        block_tokens=config.block_tokens,
        max_step_tokens=config.max_step_tokens or MOST_TOKENS,
        max_step_rows=config.max_rows,
        native=config.native,
    )
    say = log.info if config.backend == "auto" else log.warning  # what was asked for and is not to be had
    model = open_model(path, options, cache_dir, say, _Progress())
    model.info = _joined(model.info, tokenizer, config, path)
    return tokenizer, model, _sized(model, config, threads, cache_dir)


def _sized(model: Model, config: ExecutorConfig, threads: int, cache_dir: Path) -> ExecutorConfig:
    """Threads and the size of a step, where they are not set: measured on a CPU."""
    step_tokens, chunk_tokens = config.max_step_tokens, config.chunk_cap_tokens
    if not isinstance(model, CpuModel):
        step_tokens = step_tokens or max(DEVICE_STEP_TOKENS, config.max_rows)
    elif not (config.threads and step_tokens):
        found = calibrate_cached(model, threads, cache_dir)
        if not config.threads and found.threads != threads:
            threads = use_threads(found.threads)
            model.probe(step_tokens or MOST_TOKENS, config.max_rows, cache_dir)
        if not step_tokens:  # a token for each row that decodes, and prompts beside them
            step_tokens = config.max_rows + found.prompt_tokens
            chunk_tokens = chunk_tokens or found.prompt_tokens
        logs.get("executor").info("calibration", **found.described())
    chunk_tokens = chunk_tokens or max(1, step_tokens // 2)
    logs.get("executor").info("sizes", threads=threads, max_step_tokens=step_tokens, chunk_cap_tokens=chunk_tokens)
    return replace(config, threads=threads, max_step_tokens=step_tokens, chunk_cap_tokens=chunk_tokens)


class _Progress:
    """Logs how far loading is, not more often than anyone can read."""

    def __init__(self) -> None:
        self._log = logs.get("executor")
        self._stage, self._fraction = "", -1.0

    def __call__(self, stage: str, fraction: float) -> None:
        if stage != self._stage or fraction - self._fraction >= PROGRESS_STEP:
            self._stage, self._fraction = stage, fraction
            self._log.info("loading", stage=stage, fraction=round(fraction, 3))


def _joined(info: ModelInfo, tokenizer: Tokenizer, config: ExecutorConfig, path: Path) -> ModelInfo:
    """The model's version covers its tokenizer too; its context is the limit in force."""
    if tokenizer.vocabulary > info.vocabulary:
        what = f"the tokenizer of {path} has {tokenizer.vocabulary} tokens, the model {info.vocabulary}"
        raise Conflict(what, field="model", limit=info.vocabulary, value=tokenizer.vocabulary)
    version = hashlib.sha256(f"{info.version} {tokenizer.digest.hex()}".encode()).hexdigest()
    context = min(info.context_tokens, config.context_tokens or info.context_tokens)
    return replace(info, version=version, context_tokens=context)


def _described(info: ModelInfo) -> dict[str, object]:
    """For the log."""
    return {
        "name": info.name,
        "version": info.version[:16],
        "backend": info.backend,
        "arithmetic": info.arithmetic,
        "fingerprint": info.fingerprint_text,
        "bit_invariant": info.bit_invariant,
        "row_multiple": info.row_multiple,
        "pool_blocks": info.pool_blocks,
        "pool_mib": info.pool_blocks * info.block_bytes >> 20,
    }
