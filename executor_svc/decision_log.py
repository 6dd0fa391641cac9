"""Records decisions off the loop: a bounded queue to one thread that compresses and writes.

Nothing here can hold the executor up. When the queue is full, or the disk fails, frames are dropped until the queue
is empty or the disk is tried again; the log then goes on with a full frame that is marked as coming after a gap.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from jitney.errors import Conflict, InvalidRequest
from jitney.log_segments import LogWriter
from jitney.serving import logs

QUEUE_BYTES: Final = 64 << 20
QUEUE_FRAMES: Final = 4096
RETRY_S: Final = 5.0
_LOCK_NAME: Final = "lock"


@dataclass(frozen=True, slots=True)
class LogStats:
    """What was recorded. `cpu_us` is the CPU time of the writing thread."""

    frames: int
    dropped: int
    bytes_written: int
    cpu_us: int


class DecisionRecorder:
    """One log folder, locked while it is written. `record` from one thread; it never blocks."""

    def __init__(self, folder: Path, cap_bytes: int, tables: Mapping[bytes, bytes] | None = None) -> None:
        """InvalidRequest if the folder cannot be written, Conflict if another executor writes there."""
        self._folder, self._cap_bytes = folder, cap_bytes
        self._tables = dict(tables or {})
        self._log = logs.get("decision_log")
        self._lock = _locked(folder)
        self._queue: deque[tuple[bytes, bytes, int, bool]] = deque()
        self._queued_bytes = 0
        self._room = True
        self._gap = False  # frames were dropped since the last that was queued
        self._frames = self._dropped = self._bytes = self._cpu_us = 0
        self._writer: LogWriter | None = None  # of the thread, as what follows
        self._retry_at = 0.0
        self._lost = False  # the frame before was not written
        self._bell = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def record(self, snapshot: bytes, decision: bytes, round_trip_us: int) -> None:
        """A decided snapshot; dropped if the writer is that far behind."""
        with self._bell:
            if not self._room:
                self._dropped += 1
                self._gap = True
                return
            self._queue.append((snapshot, decision, round_trip_us, self._gap))
            self._gap = False
            self._queued_bytes += len(snapshot) + len(decision)
            if self._queued_bytes > QUEUE_BYTES or len(self._queue) >= QUEUE_FRAMES:
                self._room = False
            self._bell.notify()
        if not self._room:
            self._log.warning("the disk is too slow: decisions are dropped", folder=str(self._folder))

    def stats(self) -> LogStats:
        """So far."""
        return LogStats(self._frames, self._dropped, self._bytes, self._cpu_us)

    def close(self) -> None:
        """Writes what is queued and ends."""
        with self._bell:
            self._ending = True
            self._bell.notify()
        self._thread.join()
        self._lock.close()
        stats = self.stats()
        per = max(1, stats.frames)
        self._log.info(
            "closed",
            frames=stats.frames,
            dropped=stats.dropped,
            bytes_per_step=round(stats.bytes_written / per),
            cpu_us_per_step=round(stats.cpu_us / per),
        )

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            began_ns = time.thread_time_ns()
            try:
                written = self._write(*taken)
            except OSError as error:
                written = False
                self._log.warning("the decision log cannot be written", folder=str(self._folder), error=str(error))
                self._close_writer()
                self._retry_at = time.monotonic() + RETRY_S
            self._lost = not written
            self._frames += written
            self._dropped += not written
            self._cpu_us += (time.thread_time_ns() - began_ns) // 1000
        self._close_writer()

    def _write(self, snapshot: bytes, decision: bytes, round_trip_us: int, gap: bool) -> bool:
        """Whether the frame was written; not while the disk is left alone after an error."""
        if self._writer is None:
            if time.monotonic() < self._retry_at:
                return False
            self._writer = LogWriter(self._folder, self._cap_bytes, self._tables)
        before = self._writer.bytes_written
        self._writer.append(snapshot, decision, round_trip_us, gap=gap or self._lost)
        self._bytes += self._writer.bytes_written - before
        return True

    def _next(self) -> tuple[bytes, bytes, int, bool] | None:
        with self._bell:
            if not self._queue:
                self._room = True
                self._bell.wait_for(lambda: self._queue or self._ending)
            if not self._queue:
                return None
            taken = self._queue.popleft()
            self._queued_bytes -= len(taken[0]) + len(taken[1])
            return taken

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()


def _locked(folder: Path) -> BinaryIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK_NAME).open("wb")
    except OSError as error:
        what = f"the decision log cannot be written to {folder}: {error.strerror}"
        raise InvalidRequest(what, field="decision_log", value=folder) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        what = f"another executor writes its decision log to {folder}"
        raise Conflict(what, field="decision_log", value=folder) from error
    return lock
