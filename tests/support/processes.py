"""Real service processes for tests: started on free ports, waited for, ended by their own pid."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jitney.service_process import ServiceProcess


@contextlib.contextmanager
def service(
    module: str, *argv: str, folder: Path, timeout_s: float = 60.0, serving: bool = True
) -> Iterator[ServiceProcess]:
    """A running service, SERVING (or only listening); killed at the end if it has not ended by itself.

    Its log is `folder`/jitney.log.
    """
    process = ServiceProcess(module.rpartition(".")[2].removesuffix("_svc"), module, argv, folder)
    process.start()
    try:
        ready = process.serves if serving else process.listens
        wait_until(lambda: process.exit_status() is not None or (process.listens() and ready()), timeout_s)
        if process.exit_status() is not None:
            raise AssertionError(f"{module} ended with {process.exit_status()}: {process.last_words()}")
        yield process
    finally:
        process.end(0.0)


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Polls; fails after the time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"nothing after {timeout_s:g} s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process that need not be a child exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X") and pid != os.getpid()
