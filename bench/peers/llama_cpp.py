"""llama.cpp's server, built from the sources inside the source package of llama-cpp-python.

Its weights are made by its own `llama-quantize` out of the model's file: F16 and Q8_0; a quantised file is served as it
is, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from bench.environments import Environment, NotToBeHad, run_or_refuse
from bench.peers.figures import Precision
from bench.peers.loads import Ask
from bench.peers.servers import Failed, Heard, Process, free_port, started

SOURCES: Final = "llama_cpp_python==0.3.36"
TOOLS: Final = Environment(
    name="bench-llama-cpp",
    installs=(("install", "cmake==4.4.4", "ninja==1.13.2"),),
    check="import cmake, ninja",
    size="some 400 MB with what is built in it; building takes some 10 minutes of two cores",
)
CMAKE: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",  # would be fetched
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
SPARE_THREADS: Final = 16  # of its HTTP server, over the requests that are open at once
MOST_OPEN: Final = 64
Weights = Literal["F16", "Q8_0", "as it is"]


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """One kind of weights. `kind` is how a file that is served as it is, is called."""

    model: Path
    weights: Weights
    kind: str = ""

    @property
    def name(self) -> str:
        """See Peer."""
        return f"llama.cpp {self.kind or self.weights}"

    @property
    def precision(self) -> Precision:
        """See Peer."""
        return "fp16" if self.weights == "F16" else "quantised"

    def prepare(self) -> None:
        """See Peer."""
        built()
        self._file()

    async def start(self, slots: int, context: int) -> LlamaCppServer:
        """See Peer."""
        return await started(LlamaCppServer(built() / "llama-server", self._file(), slots, context))

    def _file(self) -> Path:
        """The weights; made once. Raises NotToBeHad."""
        if self.weights == "as it is":
            return self.model
        file = TOOLS.folder / f"{self.model.stem}.{self.weights}.gguf"
        if not file.exists():
            part = file.with_suffix(".part")
            command = [str(built() / "llama-quantize"), "--allow-requantize", str(self.model), str(part), self.weights]
            run_or_refuse(command)
            part.replace(file)
        return file


def built() -> Path:
    """The folder of its programs, which are built if they are not there. Raises NotToBeHad."""
    folder, build = TOOLS.folder, TOOLS.folder / "build"
    marker, recipe = folder / ".built", "\n".join((SOURCES, *CMAKE))
    if marker.exists() and marker.read_text() == recipe:
        return build / "bin"
    python = TOOLS.made()
    if not (folder / "sources").exists():
        _fetch(folder)
    sources = folder / "sources" / "vendor" / "llama.cpp"
    tools = {"PATH": f"{python.parent}:{os.environ.get('PATH', '')}"}
    print(f"building llama.cpp's server in {build}: some 10 minutes, once", flush=True)
    run_or_refuse(["cmake", "-S", str(sources), "-B", str(build), "-G", "Ninja", *CMAKE], tools)
    targets = ["--target", "llama-server", "llama-quantize"]
    run_or_refuse(["cmake", "--build", str(build), f"-j{os.cpu_count()}", *targets], tools)
    marker.write_text(recipe)
    return build / "bin"


def _fetch(folder: Path) -> None:
    """The sources, into `folder / "sources"`, by this Python's pip."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "-q", "--no-deps"]
    run_or_refuse([*command, "--no-binary=:all:", "--no-binary=llama-cpp-python", "-d", str(folder), SOURCES])
    found = sorted(folder.glob("llama_cpp_python-*.tar.gz"))
    if not found:
        raise NotToBeHad(f"pip left no source package of {SOURCES}")
    with tarfile.open(found[-1]) as package:
        package.extractall(folder / "unpacked", filter="data")
    found[-1].unlink()
    (inside,) = (folder / "unpacked").iterdir()
    inside.rename(folder / "sources")


class LlamaCppServer:
    """One process, called over HTTP with server-sent events."""

    def __init__(self, program: Path, model: Path, slots: int, context: int) -> None:
        self._port = free_port()
        self._process = Process(
            [
                str(program),
                *("--model", str(model)),
                *("--port", str(self._port)),
                *("--parallel", str(slots)),
                *("--ctx-size", str(slots * context)),
                *("--threads-http", str(max(slots, MOST_OPEN) + SPARE_THREADS)),
                *("--cache-ram", "0"),
                "--no-ui",
            ]
        )

    @property
    def pid(self) -> int:
        """See Server."""
        return self._process.popen.pid

    async def wait(self) -> None:
        """Until it serves."""
        await self._process.serves(self._healthy)

    async def _healthy(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status = await reader.readline()
        writer.close()
        return b" 200 " in status

    async def generate(self, ask: Ask, heard: Heard) -> None:
        """See Server. Half a character is held back: its tokens count when they come."""
        body = json.dumps(
            {
                "prompt": ask.prompt_ids,
                "n_predict": ask.new_tokens,
                "temperature": 0.0,
                "samplers": ["temperature"],
                "ignore_eos": True,
                "cache_prompt": False,
                "stream": True,
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise Failed(f"it answered {status.decode(errors='replace').strip()}: {(await reader.read())[-300:]!r}")
            known = 0
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    event: dict[str, Any] = json.loads(line[6:])
                    total = event.get("tokens_predicted", known)
                    if total > known:
                        heard(total - known)
                        known = total
        finally:
            writer.close()

    async def stop(self) -> None:
        """See Server."""
        await self._process.stop()
