"""vLLM 0.33's scheduler in an environment of its own, as a subprocess that takes steps when it is told to.

The environment is made once, in the cache directory: `pip install --no-deps vllm`, a torch, and what its import asks
for. It needs no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.environments import Environment, NotToBeHad

VLLM: Final = "vllm==0.33.0"
NEEDS: Final = (
    "torch==2.13.0",
    "numpy==2.4.6",
    "aiohttp==3.14.5",
    "cachetools==8.0.2",
    "cbor2==6.3.0",
    "cloudpickle==3.1.3",
    "einops==0.8.2",
    "fastapi==0.165.0",
    "llguidance==1.9.1",
    "msgspec==0.23.0",
    "openai==3.57.0",
    "oss-harmony==0.0.11",
    "packaging==26.4",
    "partial-json-parser==0.2.1.1.post7",
    "pillow==13.0.0",
    "prometheus-client==0.26.0",
    "psutil==7.2.2",
    "py-cpuinfo==9.0.0",
    "pybase64==1.5.1",
    "pydantic==2.14.4",
    "pyzmq==27.3.0",
    "regex==2026.11.19",
    "requests==2.34.2",
    "transformers==5.24.0",
    "uvloop==0.23.0",
    "xgrammar==0.2.9",
)

ENVIRONMENT: Final = Environment(
    name="bench-vllm",
    installs=(("install", *NEEDS), ("install", "--no-deps", VLLM)),
    check="from vllm.v1.core.sched.scheduler import Scheduler",
    size="some 2 GB",
)


def variables() -> dict[str, str]:
    """The environment variables of its processes."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "", "VLLM_LOGGING_LEVEL": "ERROR"}


class VllmProcess:
    """A subprocess in that environment. It does nothing but what it is told, so that its rounds and others' take
    turns."""

    def __init__(self, script: str) -> None:
        """`script` lies beside this file. Raises NotToBeHad."""
        command = [str(ENVIRONMENT.made()), "-P", str(Path(__file__).with_name(script))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables(),
        )

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, **message: Any) -> dict[str, Any]:
        """Its answer to one message. Raises NotToBeHad if it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as error:
            raise NotToBeHad(f"its process ended: {error}") from error
        if not line:
            raise NotToBeHad(f"its process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class VllmSide(VllmProcess):
    """Its scheduler, step by step."""

    def __init__(self) -> None:
        """Raises NotToBeHad."""
        super().__init__("vllm_side.py")

    def build(self, running: int, waiting: int, policy: str, seed: int) -> None:
        """A scheduler with so many rows, and so many requests that wait."""
        got = self.ask(build={"running": running, "waiting": waiting, "policy": policy, "seed": seed})
        if got["running"] < running - 4:
            raise NotToBeHad(f"it runs {got['running']} rows, {running} were asked for")

    def steps_us(self, count: int) -> list[float]:
        """Times of the next steps, in microseconds."""
        times: Sequence[int] = self.ask(steps=count)["ns"]
        return [ns / 1e3 for ns in times]
