"""The three services on one machine: started, watched, started again when they die, stopped in order.

    with Supervisor(ServeOptions(state_dir=folder, executor_args=("--model=...",))) as services:
        client = Client(services.executor_target)

Schedulers and cache come first, the executor once it can be told their addresses; on the way out the executor goes
first, so that it can finish what it runs. A service that dies is started again on its old port, after a pause that
doubles from 0.2 to 10 s while it keeps dying. All children end with this process, even if it is killed. One state
folder belongs to one supervisor at a time (a lock that the kernel gives back), and has the log of all: jitney.log.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TextIO

from jitney.errors import Away, Conflict, InvalidRequest, JitneyError, Missing
from jitney.service_process import Progress, ServiceProcess
from jitney.serving import logs

TICK_S: Final = 0.05
MARGIN_S: Final = 5.0  # A drained service gets so long to end after its own grace.
MAX_LOG_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What is started, and where. Arguments go to the services as they are."""

    state_dir: Path
    schedulers: int = 1
    executor_port: int = 0  # 0: a free one.
    grace_s: float = 30.0
    start_timeout_s: float = 900.0
    executor_args: tuple[str, ...] = ()
    scheduler_args: tuple[str, ...] = ()
    cache_args: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises InvalidRequest."""
        if not 1 <= self.schedulers <= 16:
            raise InvalidRequest(
                f"schedulers must be 1 to 16, got {self.schedulers}",
                field="schedulers",
                limit="1 to 16",
                value=self.schedulers,
            )


class Supervisor:
    """Start it once; it belongs to one user. A thread of its own starts and watches the children."""

    def __init__(self, options: ServeOptions) -> None:
        options.check()
        self.options = options
        self.log_path = options.state_dir / "jitney.log"
        self._log = logs.get("supervisor")
        self._lock: TextIO | None = None
        self._keeper: threading.Thread | None = None
        self._starting = threading.Lock()  # No child is started once `_stopping` was set under it.
        self._stopping = threading.Event()
        self._finished = threading.Event()
        self._started = threading.Event()
        self._failure: JitneyError | None = None
        self._executor: ServiceProcess | None = None
        folder, grace = options.state_dir, f"--grace-s={options.grace_s:g}"
        self._schedulers = [
            ServiceProcess(f"scheduler-{number}", "scheduler_svc", (grace, *options.scheduler_args), folder)
            for number in range(options.schedulers)
        ]
        self._cache = ServiceProcess("cache", "cache_svc", (grace, *options.cache_args), folder)

    @property
    def executor_target(self) -> str:
        """Address of the executor, once started."""
        return self._named("executor").target

    @property
    def cache_target(self) -> str:
        """Address of the cache."""
        return self._cache.target

    @property
    def scheduler_targets(self) -> list[str]:
        """Addresses of the schedulers."""
        return [scheduler.target for scheduler in self._schedulers]

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: "executor", "cache", "scheduler-0", ...; 0 while one is down."""
        return {service.name: service.pid for service in self._all()}

    @property
    def restarts(self) -> dict[str, int]:
        """How often each was started again."""
        return {service.name: service.restarts for service in self._all()}

    def start(self, on_progress: Callable[[Progress], None] | None = None) -> None:
        """Returns once all are SERVING; `on_progress` is called from this thread while the model loads.

        Raises InvalidRequest if the folder cannot be used, Conflict if it is in use, Away if a service cannot start or
        `stop` was called meanwhile.
        """
        self._claim()
        self._keeper = threading.Thread(target=self._keep, name="supervisor", daemon=True)
        self._keeper.start()
        shown: Progress | None = None
        try:
            while not self._started.wait(TICK_S):
                executor = self._executor
                progress = executor.progress() if on_progress is not None and executor is not None else None
                if on_progress is not None and progress is not None and progress != shown:
                    shown = progress
                    on_progress(progress)
            if self._failure is not None:
                raise self._failure
            if self._stopping.is_set():
                raise Away("stopped while starting", field="state_dir", value=self.options.state_dir)
        except BaseException:
            self.stop()
            raise

    def stop(self, *, at_once: bool = False) -> None:
        """Drains and ends the executor, then the others; kills what does not end. May be called twice."""
        with self._starting:
            self._stopping.set()
        grace_s = 0.0 if at_once else self.options.grace_s + MARGIN_S
        groups = [[self._executor] if self._executor is not None else [], [*self._schedulers, self._cache]]
        for group in groups:
            threads = [threading.Thread(target=service.end, args=(grace_s,)) for service in group]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self._finished.set()
        if self._keeper is not None:
            self._keeper.join()
        if self._lock is not None:
            self._lock.close()

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to a service by its name; returns the process id that got it. Raises Missing."""
        service = self._named(name)
        pid = service.pid
        if pid == 0:
            raise Missing(f"{name} is not running", field="name", value=name)
        service.signal(number)
        return pid

    def wait_serving(self, name: str, timeout_s: float = 60.0, not_pid: int = 0) -> int:
        """Waits until the service (in another process than `not_pid`) says SERVING; its process id. Raises Away."""
        service, end = self._named(name), time.monotonic() + timeout_s
        while True:
            pid = service.pid
            if pid not in (0, not_pid) and service.serves():
                return pid
            if time.monotonic() >= end:
                raise Away(f"{name} does not serve after {timeout_s:g} s", field="name", value=name)
            time.sleep(TICK_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def _all(self) -> list[ServiceProcess]:
        executor = [self._executor] if self._executor is not None else []
        return [*self._schedulers, self._cache, *executor]

    def _named(self, name: str) -> ServiceProcess:
        for service in self._all():
            if service.name == name:
                return service
        raise Missing(f"there is no service {name!r}", field="name", value=name)

    def _claim(self) -> None:
        """Takes the state folder, and makes room in the log. InvalidRequest if it cannot be used, Conflict if it is."""
        folder = self.options.state_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "serve.lock").open("a+", encoding="ascii")
        except OSError as error:
            what = f"{folder} cannot be the folder of lock and log: {error.strerror}"
            raise InvalidRequest(what, field="state_dir", value=folder) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip()
            lock.close()
            message = f"{folder} is in use by another jitney serve (process {owner}): give another --state-dir"
            raise Conflict(message, field="state_dir", value=folder) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock
        if self.log_path.exists() and self.log_path.stat().st_size > MAX_LOG_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))

    def _keep(self) -> None:
        """The keeper's thread: starts everything, then watches until `stop` has ended the children."""
        try:
            with contextlib.suppress(_Stopped):
                self._start_all()
        except JitneyError as error:
            self._failure = error
            self._stopping.set()
        except Exception as error:
            self._failure = JitneyError(f"the supervisor failed: {error!r}")
            self._stopping.set()
        self._started.set()
        while not self._finished.wait(TICK_S):
            for service in self._all():
                self._revive(service)

    def _start_all(self) -> None:
        first = [*self._schedulers, self._cache]
        for service in first:
            self._start(service)
        self._await(first, ServiceProcess.listens)
        executor = ServiceProcess(
            "executor",
            "executor_svc",
            (
                f"--schedulers={','.join(self.scheduler_targets)}",
                f"--cache={self.cache_target}",
                f"--grace-s={self.options.grace_s:g}",
                *self.options.executor_args,
            ),
            self.options.state_dir,
            self.options.executor_port,
        )
        self._executor = executor
        self._start(executor)
        self._await([executor], ServiceProcess.listens)
        self._await([*first, executor], ServiceProcess.serves)
        self._write_endpoints()

    def _start(self, service: ServiceProcess) -> None:
        with self._starting:
            if self._stopping.is_set():
                raise _Stopped
            service.start()

    def _await(self, services: list[ServiceProcess], done: Callable[[ServiceProcess], bool]) -> None:
        """Waits for the services; raises Away if one ends or the time is over."""
        for _ in self._ticks():
            for service in services:
                if (status := service.exit_status()) is not None:
                    message = f"{service.name} ended with status {status} while starting: {service.last_words()}"
                    raise Away(message, field="service", value=service.name)
            if all(done(service) for service in services):
                return
        names = ", ".join(service.name for service in services)
        raise Away(f"{names}: not ready after {self.options.start_timeout_s:g} s", field="service", value=names)

    def _ticks(self) -> Iterator[None]:
        end = time.monotonic() + self.options.start_timeout_s
        while time.monotonic() < end:
            yield
            if self._stopping.wait(TICK_S):
                raise _Stopped

    def _revive(self, service: ServiceProcess) -> None:
        """Starts a service again that ended."""
        if self._stopping.is_set() or not self._started.is_set():
            return
        status = service.exit_status()
        last_words = service.last_words() if status is not None and status > 0 else ""
        status = service.ended()
        if status is not None:
            self._log.warning(
                "service ended, starting it again",
                name=service.name,
                status=status,
                last_words=last_words,
                after_s=round(max(0.0, service.not_before - time.monotonic()), 1),
            )
        elif service.pid == 0 and time.monotonic() >= service.not_before:
            with contextlib.suppress(_Stopped):
                self._start(service)

    def _write_endpoints(self) -> None:
        """For people and tools: where everything listens."""
        content = {
            "executor": self.executor_target,
            "cache": self.cache_target,
            "schedulers": self.scheduler_targets,
        }
        (self.options.state_dir / "endpoints.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


class _Stopped(Exception):
    """`stop` was called while the services were being started."""
