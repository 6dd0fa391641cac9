"""Peers that are Python packages: a script beside this file runs in their environment and is talked to by pipes.

One JSON object a line. To it: {"id": 7, "prompt": [..ids..], "new_tokens": 64}. From it: {"ready": true} once, then
{"came": [[7, 1], [8, 1]]} as tokens come: pairs of an id and how many; or {"failed": "why"}, after which it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.loads import Ask
from bench.peers.servers import START_S, Failed, Heard, Process

LINE_BYTES = 1 << 20


class PipedServer:
    """A script with its requests."""

    def __init__(
        self, python: Path, script: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        """`script` lies beside this file; `variables` are added to its environment."""
        variables = {
            **(variables or {}),
            "PYTHONPATH": "",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        command = [str(python), "-P", str(Path(__file__).with_name(script)), *arguments]
        self._process = Process(command, variables, piped=True)
        self._heard: dict[int, Heard] = {}
        self._left: dict[int, int] = {}
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._count = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """See Server."""
        return self._process.popen.pid

    async def wait(self) -> None:
        """Until it is ready. Raises Failed."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._process.popen.stdout)
        try:
            line = await asyncio.wait_for(reader.readline(), START_S)
            event: dict[str, Any] = json.loads(line or b"{}")
            if not event.get("ready"):
                raise Failed(str(event.get("failed") or f"it ended: {self._process.last_words()}"))
        except (TimeoutError, ValueError) as error:
            raise Failed(f"it was not ready in {START_S:g} s") from error
        self._task = asyncio.create_task(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        failure = ""
        while line := await reader.readline():
            event: dict[str, Any] = json.loads(line)
            failure = event.get("failed", "")
            for number, tokens in event.get("came", ()):
                if number not in self._left:
                    continue
                tokens = min(tokens, self._left[number])
                self._heard[number](tokens)
                self._left[number] -= tokens
                if not self._left[number]:
                    self._ends[number].set_result(None)
                    del self._left[number]
        for number in list(self._left):
            self._ends[number].set_exception(Failed(failure or f"it ended: {self._process.last_words()}"))

    async def generate(self, ask: Ask, heard: Heard) -> None:
        """See Server."""
        self._count += 1
        number = self._count
        self._heard[number], self._left[number] = heard, ask.new_tokens
        self._ends[number] = asyncio.get_running_loop().create_future()
        message = json.dumps({"id": number, "prompt": ask.prompt_ids, "new_tokens": ask.new_tokens})
        pipe = self._process.popen.stdin
        assert pipe is not None
        try:
            pipe.write(message.encode() + b"\n")
            pipe.flush()
        except OSError as error:
            raise Failed(f"it ended: {self._process.last_words()}") from error
        try:
            await self._ends[number]
        finally:
            del self._ends[number], self._heard[number]

    async def stop(self) -> None:
        """See Server."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._process.stop()
