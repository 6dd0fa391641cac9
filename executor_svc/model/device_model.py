"""A loaded model on a GPU: weights, network, KV pool and sampling behind one call a step.

`submit` and `collect` are what the executor's model threads call (queued_runner.py): between them the host is free, and
a second step may be queued behind the first, its tokens named by `step_plan.drawn_by`. `run` is both.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.attention import KVShape
from executor_svc.attention_device import DeviceAttention, device_name
from executor_svc.model.device_llama import DeviceLlama
from executor_svc.model.device_steps import DeviceSteps
from executor_svc.model.gguf_file import Progress
from executor_svc.model.graphs import LEAST_WIDTH, buckets_up_to, recorder_for
from executor_svc.model.info import info_of
from executor_svc.model.loader import no_progress
from executor_svc.model.weights import EMBEDDING, Weights
from executor_svc.model_info import ModelInfo
from executor_svc.sampling_device import Drawn, Way, result_of
from executor_svc.step_plan import STEPS_IN_FLIGHT, StepPlan, StepResult
from jitney.errors import InvalidRequest

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Submitted:
    """A step that was queued. `arrays`: where its results will be on the host, once `end` has come."""

    plan: StepPlan
    arrays: tuple[torch.Tensor, ...]
    end: torch.cuda.Event | None


class DeviceModel:
    """One model on one device: one thread that submits, one that collects. Its sums may depend on what else is in a
    step: it does not keep the promise of equal bits."""

    def __init__(self, llama: DeviceLlama, info: ModelInfo, max_rows: int, max_blocks: int) -> None:
        self.llama = llama
        self.config = llama.config
        self.backend = llama.backend
        self.info = info
        self.steps = DeviceSteps(llama, max_rows, max_blocks, recorder_for(llama.device))
        self._cuda = llama.device.type == "cuda"
        outputs = self.steps.outputs
        self._results = (outputs.drawn, outputs.own, outputs.top_ids, outputs.top_values)
        self._hosts = [
            tuple(torch.zeros(each.shape, dtype=each.dtype, pin_memory=self._cuda) for each in self._results)
            for _ in range(STEPS_IN_FLIGHT)
        ]
        self._turn = 0

    @torch.inference_mode()
    def warm_up(self, progress: Progress = no_progress) -> None:
        """Records the steps of every batch size over short contexts; others are recorded when they come first. Of the
        largest batch also the way of sampling that takes most memory: the others find it there."""
        buckets = buckets_up_to(self.steps.max_rows)
        for done, rows in enumerate(reversed(buckets)):
            progress("recording the steps", done / len(buckets))
            ways = [(Way.GREEDY, False)] + [(Way.FILTERED, True)] * (done == 0)
            self.steps.decode_steps(rows, LEAST_WIDTH).make_ready(ways)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes the step and draws its tokens. `compute_us` is left to whoever holds a clock."""
        return self.collect(self.submit(plan))

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Submitted:
        """Queues the step behind what runs; at most STEPS_IN_FLIGHT are submitted and not collected."""
        watched = self.backend.in_use  # where the device is emulated: there a step is over when it has been queued
        with watched.step(plan, self.backend.shape.block_tokens) if watched is not None else nullcontext():
            return self._submit(plan)

    def _submit(self, plan: StepPlan) -> Submitted:
        if len(plan.copies):
            sources, targets = torch.from_numpy(np.ascontiguousarray(plan.copies.T))
            self.backend.copy_blocks(sources, targets)
        if plan.tokens:
            self.steps.launch(plan)
        self._turn = (self._turn + 1) % STEPS_IN_FLIGHT
        wanted = 4 if (plan.sampling.logprobs >= 0).any() else 1
        pairs = list(zip(self._hosts[self._turn], self._results, strict=True))[:wanted]
        for host, result in pairs:
            host[: plan.rows].copy_(result[: plan.rows], non_blocking=True)
        end = None
        if self._cuda:
            end = torch.cuda.Event(blocking=True)  # whoever waits for it leaves the processor to others
            end.record()
        return Submitted(plan, tuple(host for host, _ in pairs), end)

    def collect(self, submitted: Submitted) -> StepResult:
        """Waits for the step; its result."""
        if submitted.end is not None:
            submitted.end.synchronize()
        plan = submitted.plan
        tokens, *logprobs = (array.numpy()[plan.sample_rows] for array in submitted.arrays)
        drawn = Drawn(tokens, (logprobs[0], logprobs[1], logprobs[2]) if logprobs else None)
        return result_of(plan.step, drawn, plan.sampling.logprobs)


def own_type(weights: Weights) -> str:
    """The half precision that the weights are in; bf16 for those that are in neither."""
    return "fp16" if weights.tensors[EMBEDDING].dtype == torch.float16 else "bf16"


def build_device_model(
    weights: Weights, backend: DeviceAttention, arithmetic: str, *, max_rows: int, progress: Progress = no_progress
) -> DeviceModel:
    """The network over a backend whose pool has the arithmetic's type."""
    config, shape = weights.config, backend.shape
    progress("sending the weights to the device", 0.5)
    max_tokens = min(config.context_tokens, shape.blocks * shape.block_tokens)
    llama = DeviceLlama(weights, backend, TYPES[arithmetic], max_tokens)
    computes = (
        f"linear={arithmetic}-torch",
        backend.describe(),
        f"machine=torch-{torch.__version__} cuda-{torch.version.cuda} {device_name(backend.device)}",
    )
    model = DeviceModel(llama, info_of(weights, backend, arithmetic, computes), max_rows, backend.blocks_of(max_tokens))
    try:
        model.warm_up(progress)
    except torch.OutOfMemoryError as error:
        what = f"--pool-blocks {shape.blocks} leave no room for steps of {max_rows} rows: {str(error).splitlines()[0]}"
        raise InvalidRequest(what, field="pool_blocks", limit="fewer", value=shape.blocks) from error
    progress("ready", 1.0)
    return model


def pool_shape(weights: Weights, arithmetic: str, kv: str, blocks: int, block_tokens: int) -> KVShape:
    """The pool's. InvalidRequest: keys and values are to be of another type than the arithmetic."""
    if kv not in ("auto", arithmetic):
        what = f"on a GPU keys and values have the type of the arithmetic: --kv is {kv}, --arithmetic {arithmetic}"
        raise InvalidRequest(what, field="kv", limit=arithmetic, value=kv)
    config = weights.config
    return KVShape(blocks, config.layers, block_tokens, config.kv_heads, config.head_size, TYPES[arithmetic])
