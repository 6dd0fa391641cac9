"""A loaded model: weights, network, KV pool and sampler behind one call a step."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from executor_svc.attention import AttentionBackend, KVShape
from executor_svc.backends import select_backend
from executor_svc.kernels.elementwise import select_elementwise
from executor_svc.model.config import BadModel
from executor_svc.model.gguf_file import Progress
from executor_svc.model.info import info_of
from executor_svc.model.linear import Arithmetic, Packer, best_arithmetic
from executor_svc.model.llama import Llama
from executor_svc.model.loader import load_weights, no_progress
from executor_svc.model.probe import probe_cached
from executor_svc.model_info import ModelInfo
from executor_svc.sampling import select_sampler
from executor_svc.step_plan import StepPlan, StepResult

KV_TYPES = {"fp16": torch.float16, "fp32": torch.float32}


class CpuModel:
    """One model on this machine's CPU, one step at a time. Two with equal fingerprints give equal bits."""

    def __init__(self, llama: Llama, info: ModelInfo) -> None:
        self.llama = llama
        self.config = llama.config
        self.backend: AttentionBackend = llama.backend
        self._sampler = select_sampler(llama.elementwise)
        self.info = info

    @staticmethod
    def load(
        path: Path,
        *,
        arithmetic: Arithmetic | None = None,
        kv: str = "fp16",
        pool_blocks: int,
        block_tokens: int = 16,
        max_step_tokens: int = 2048,
        max_step_rows: int = 256,
        cache_dir: Path | None = None,
        progress: Progress = no_progress,
        native: bool = True,
    ) -> CpuModel:
        """Loads a GGUF file or a Hugging Face directory.

        `arithmetic` None: see best_arithmetic. `max_step_*` only tell the probe which sizes to try, as far as the pool
        reaches; larger steps run too. `native` false keeps to torch's own kernels. Raises BadModel, or InvalidRequest
        for an arithmetic that this machine has not, and for a pool that it has no room for.
        """
        arithmetic = arithmetic or best_arithmetic(native)
        weights = load_weights(path, cache_dir, progress)
        config = weights.config
        shape = KVShape(
            blocks=pool_blocks,
            layers=config.layers,
            block_tokens=block_tokens,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            dtype=KV_TYPES[kv],
        )
        try:
            backend = select_backend(shape, prefer=None if native else "torch")
        except ValueError as error:
            raise BadModel(f"{path}: {error}", field="head_size", value=config.head_size) from None
        elementwise = select_elementwise(native)
        packer = Packer(arithmetic, native)
        progress("packing the weights", 0.96)
        llama = Llama(weights, packer, backend, elementwise)
        progress("probing the kernels", 0.98)
        computes = (
            packer.describe(),
            backend.describe(),
            f"elementwise={elementwise.describe()}",
            f"machine={_machine()}",
        )
        model = CpuModel(llama, info_of(weights, backend, arithmetic, computes, row_multiple=llama.row_multiple))
        model.probe(max_step_tokens, max_step_rows, cache_dir)
        progress("ready", 1.0)
        return model

    def probe(self, max_step_tokens: int, max_step_rows: int, cache_dir: Path | None) -> None:
        """Finds the number of rows to pad to, with torch's number of threads; again, when that has changed."""
        shape = self.backend.shape
        most = min(max_step_tokens, shape.blocks * shape.block_tokens + max_step_rows)  # a step writes no more
        sizes = [(layer, max_step_rows if head else most) for layer, head in self.llama.shapes()]
        rows = probe_cached(sizes, self.info.fingerprint_text, cache_dir)
        self.llama.pad_to(rows.multiple)
        invariant = rows.invariant and self.backend.bit_invariant
        self.info = replace(self.info, bit_invariant=invariant, row_multiple=rows.multiple)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes the step and draws its tokens. `compute_us` is left to whoever holds a clock."""
        if len(plan.copies):
            sources, targets = torch.from_numpy(np.ascontiguousarray(plan.copies.T))
            self.backend.copy_blocks(sources, targets).wait()
        return self._sampler.draw(plan.step, self.llama.forward(plan), plan.sampling)


def _machine() -> str:
    """What decides which of torch's kernels run."""
    return f"torch-{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {platform.machine()} {_vendor()}"


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "unknown")
