"""What a peer is to this bench: something that starts a server, and a server that answers requests.

Every server is a process tree of its own; tokens are timed where they arrive, in the bench's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from bench.peers.figures import Precision
from bench.peers.loads import Ask

START_S: Final = 300.0
STOP_S: Final = 20.0
POLL_S: Final = 0.1
Heard = Callable[[int], None]  # with how many new tokens there are
S = TypeVar("S", bound="Server")


class Failed(Exception):
    """A server did not start, or did not answer as it should; the message says what it said last."""


class Server(Protocol):
    """One that was started."""

    @property
    def pid(self) -> int:
        """Root of its process tree."""

    async def wait(self) -> None:
        """Until it serves. Raises Failed."""

    async def generate(self, ask: Ask, heard: Heard) -> None:
        """Returns when the answer has all its tokens. Raises Failed."""

    async def stop(self) -> None:
        """Ends its processes."""


async def started(server: S) -> S:
    """The server once it serves; one that does not is stopped."""
    try:
        await server.wait()
    except BaseException:
        await server.stop()
        raise
    return server


class Peer(Protocol):
    """A program, with one kind of weights."""

    @property
    def name(self) -> str:
        """As it is shown."""

    @property
    def precision(self) -> Precision:
        """Of its weights."""

    def prepare(self) -> None:
        """Installs and builds what is needed, once. Raises NotToBeHad."""

    async def start(self, slots: int, context: int) -> Server:
        """With so many requests at a time, each of at most `context` tokens. Raises Failed."""


class Process:
    """A process in a group of its own that writes what it says to a file."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str] | None = None, *, piped: bool = False):
        self._folder = tempfile.TemporaryDirectory(prefix="jitney-peer-")
        self._said = Path(self._folder.name) / "said"
        with self._said.open("wb") as said:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else said,
                stderr=said,
                env={**os.environ, **(variables or {})},
                start_new_session=True,
            )

    def last_words(self) -> str:
        """The end of what it said."""
        lines = self._said.read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:]) or "it said nothing"

    def check(self) -> None:
        """Raises Failed if it has ended."""
        if self.popen.poll() is not None:
            raise Failed(f"it ended with status {self.popen.returncode}: {self.last_words()}")

    async def serves(self, ready: Callable[[], Awaitable[bool]]) -> None:
        """Returns once it is `ready`; raises Failed if it ends before, or takes too long."""
        end = asyncio.get_running_loop().time() + START_S
        while not await ready():
            self.check()
            if asyncio.get_running_loop().time() > end:
                raise Failed(f"it does not serve after {START_S:g} s: {self.last_words()}")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to the group for what is left."""
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
        if self.popen.poll() is None:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.popen.wait, STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._folder.cleanup()


def free_port() -> int:
    """One that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process and all below it: memory (what is shared counts in each), and CPU time so far; and the CPU time of
    the whole machine."""

    resident_mib: float
    cpu_s: float
    machine_cpu_s: float

    @classmethod
    def of(cls, root: int) -> Usage:
        """Now."""
        children: dict[int, list[int]] = {}
        used: dict[int, tuple[int, int]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                used[int(entry.name)] = int(fields[21]), int(fields[11]) + int(fields[12])
                children.setdefault(int(fields[1]), []).append(int(entry.name))
        pages, ticks, open_ = 0, 0, [root]
        while open_:
            pid = open_.pop()
            pages, ticks = (total + one for total, one in zip((pages, ticks), used.get(pid, (0, 0)), strict=True))
            open_ += children.get(pid, [])
        user, nice, system = (int(field) for field in Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
        hertz = os.sysconf("SC_CLK_TCK")
        memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return cls(memory, ticks / hertz, (user + nice + system) / hertz)
