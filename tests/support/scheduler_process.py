"""A scheduler replica as a real process on a free port."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]


class SchedulerProcess:
    """Listening from its construction on, ended by `close` or a `with` block. `port` may be one that it had before."""

    def __init__(self, port: int = 0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="jitney-scheduler-")
        told = Path(self._folder.name) / "port"
        self._log = (Path(self._folder.name) / "log").open("wb")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "scheduler_svc", f"--port={port}", f"--port-file={told}", "--grace-s=1"]
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=self._log, stderr=self._log)
        end = time.monotonic() + 60
        while not told.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise RuntimeError(self.log())
            time.sleep(0.02)
        self.port = int(told.read_text())

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def log(self) -> str:
        """All that it has logged."""
        return (Path(self._folder.name) / "log").read_text()

    def kill(self) -> None:
        """kill -9, and waits for it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends it, and leaves nothing behind."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
