"""One service as a child process: started, asked for its health, started again, ended. Used by the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import jitney
from jitney.serving import channels, config

FIRST_BACKOFF_S: Final = 0.2
LAST_BACKOFF_S: Final = 10.0
SETTLED_AFTER_S: Final = 30.0  # A process that lived so long is started again at once.


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a service is with loading."""

    stage: str
    fraction: float


class ServiceProcess:
    """A child and its address, which stays the same when it is started again.

    `start` must be called by a thread that lives as long as the child may: the child ends with it.
    """

    def __init__(self, name: str, module: str, argv: Sequence[str], folder: Path, port: int = 0) -> None:
        self.name = name
        self.port = port
        self.restarts = 0
        self.not_before = 0.0  # On the monotonic clock: when it may be started again.
        self._module = module
        self._argv = tuple(argv)
        self._port_file = folder / f"{name}.port"
        self._log = folder / "jitney.log"
        self._log_from = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    @property
    def target(self) -> str:
        """host:port, once it listened for the first time."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the running process; 0 if there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def start(self) -> None:
        """Starts the process; its output is appended to the log."""
        self._port_file.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "jitney.serving.child", str(os.getpid()), self._module, *self._argv]
        command += [f"--port={self.port}", f"--port-file={self._port_file}", "--log-format=json"]
        with self._log.open("ab") as log:
            self._log_from = log.tell()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), process_group=0
            )
        self._started = time.monotonic()

    def exit_status(self) -> int | None:
        """Of a process that has ended (negative: the signal); None while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    def ended(self) -> int | None:
        """As `exit_status`, once for each end: the process counts as gone and `not_before` is set."""
        status = self.exit_status()
        if status is None:
            return None
        self._process = None
        now = time.monotonic()
        if now - self._started > SETTLED_AFTER_S:
            self._backoff_s = FIRST_BACKOFF_S
        self.not_before = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)
        self.restarts += 1
        return status

    def listens(self) -> bool:
        """Whether it has said its port."""
        if self._port_file.exists():
            self.port = int(self._port_file.read_text(encoding="ascii"))
            return True
        return False

    def serves(self, timeout_s: float = 0.5) -> bool:
        """Whether its health is SERVING."""
        if not self.port or not self.pid:
            return False
        with channels.sync_channel(self.target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def signal(self, number: int) -> None:
        """Sends a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, grace_s: float) -> int | None:
        """SIGTERM, and SIGKILL after `grace_s`; returns the exit status."""
        if self._process is None:
            return None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def said(self) -> list[dict[str, Any]]:
        """What this process has logged since it was started, as far as it is JSON."""
        if self._process is None:
            return []
        records: list[dict[str, Any]] = []
        with self._log.open("rb") as log:
            log.seek(self._log_from)
            for line in log:
                record = _parsed(line)
                if record.get("pid") == self._process.pid:
                    records.append(record)
        return records

    def progress(self) -> Progress | None:
        """The newest `loading` line of its log."""
        for record in reversed(self.said()):
            if record.get("event") == "loading":
                return Progress(str(record.get("stage", "")), float(record.get("fraction", 0.0)))
        return None

    def last_words(self) -> str:
        """Why it ended, in one line, as far as its log says."""
        for record in reversed(self.said()):
            if record.get("level") == "error":
                return str(record.get("error") or record.get("event"))
        with self._log.open("rb") as log:
            log.seek(self._log_from)
            lines = [line.strip().decode(errors="replace") for line in log.readlines()[-20:]]
        plain = [line for line in lines if line and not line.startswith("{")]
        return plain[-1] if plain else "it said nothing"


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _environment() -> dict[str, str]:
    """The environment, with this checkout on the module path unless it is installed."""
    environment = config.environment()
    root = str(Path(jitney.__file__).resolve().parent.parent)
    if root != sysconfig.get_path("purelib"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH", ""))))
    return environment
