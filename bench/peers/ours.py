"""Jitney's three services, as `jitney serve` runs them."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.peers.figures import OURS, OURS_INT8, Precision
from bench.peers.loads import Ask
from bench.peers.servers import Failed, Heard, Process, free_port, started
from jitney.client import AsyncClient, Delta, Options, RetryPolicy
from jitney.errors import JitneyError


@dataclass(frozen=True, slots=True)
class Ours:
    """Default settings but for the limit of rows. `int8`: with the executor's int8 weights."""

    model: Path
    int8: bool = False

    @property
    def name(self) -> str:
        """See Peer."""
        return OURS_INT8 if self.int8 else OURS

    @property
    def precision(self) -> Precision:
        """See Peer."""
        return "quantised" if self.int8 else "fp16"

    def prepare(self) -> None:
        """See Peer: there is nothing to make."""

    async def start(self, slots: int, context: int) -> OurServer:
        """See Peer."""
        flags = [f"--max-rows={slots}", *(["--arithmetic=int8"] if self.int8 else [])]
        return await started(OurServer(self.model, flags))


class OurServer:
    """`jitney serve`, called through the client library."""

    def __init__(self, model: Path, flags: list[str]) -> None:
        self._state = tempfile.TemporaryDirectory(prefix="jitney-peer-state-")
        target = f"127.0.0.1:{free_port()}"
        port = target.rpartition(":")[2]
        jitney = [sys.executable, "-c", "from jitney.cli import main; main()"]
        command = [*jitney, "serve", f"--model={model}", f"--port={port}", "--grace=1"]
        command += [f"--state-dir={self._state.name}", *(f"--executor={flag}" for flag in flags)]
        self._process = Process(command)
        self._client = AsyncClient(target, retry=RetryPolicy(connect_s=1.0))

    @property
    def pid(self) -> int:
        """See Server."""
        return self._process.popen.pid

    async def wait(self) -> None:
        """Until it serves."""
        await self._process.serves(self._ready)

    async def _ready(self) -> bool:
        try:
            await self._client.model_info()
        except JitneyError:
            return False
        return True

    async def generate(self, ask: Ask, heard: Heard) -> None:
        """See Server."""
        options = Options(max_tokens=ask.new_tokens, ignore_eos=True)
        try:
            async with self._client.generate(list(ask.prompt_ids), options) as answer:
                async for event in answer:
                    if isinstance(event, Delta) and event.token_ids:
                        heard(len(event.token_ids))
        except JitneyError as error:
            raise Failed(str(error)) from error

    async def stop(self) -> None:
        """See Server."""
        await self._client.aclose()
        await self._process.stop()
        self._state.cleanup()
