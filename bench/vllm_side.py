"""vLLM's in-process scheduler, timed step by step; runs in an environment of its own, driven by `bench.vllm`.

Reads one JSON object a line from stdin, answers with one a line on stdout:

    {"build": {"running": 256, "waiting": 1000, "policy": "fcfs", "seed": 1}}   -> {"running": 256, "waiting": 1000}
    {"steps": 50}                                                              -> {"ns": [..50 times..], "running": ..}

A step is `schedule()` and `update_from_output()` with one new token a row, as the engine core does around its model.
Requests come from the same generator as Jitney's; for each one that ends another one arrives, outside the time taken.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

sys.path.insert(0, str(Path(__file__).parent))
from workload import BLOCK_TOKENS, CONTEXT_TOKENS, POOL_BLOCKS, STEP_TOKENS, Workload

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": CONTEXT_TOKENS,
    "torch_dtype": "float16",
}
_STEPS_TO_FILL = 2000


class Side:
    """One scheduler with its requests."""

    def __init__(self, running: int, waiting: int, policy: str, seed: int) -> None:
        self._scheduler = _scheduler(running, policy)
        self._workload = Workload(seed)
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
        self._count = 0
        for _ in range(running + waiting):
            self._arrive()
        for _ in range(_STEPS_TO_FILL):
            self.step()
            if self.running == min(running, self._count):
                break
        gc.collect()
        gc.freeze()

    @property
    def running(self) -> int:
        """Rows."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests without a row."""
        return len(self._scheduler.waiting)

    def step(self) -> int:
        """One step; nanoseconds of the scheduler's two calls."""
        started = time.perf_counter_ns()
        output = self._scheduler.schedule()
        took = time.perf_counter_ns() - started
        ids = list(output.num_scheduled_tokens)
        requests = self._scheduler.requests
        sampled = [[1] if _samples(requests[i]) else [] for i in ids]
        result = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={i: n for n, i in enumerate(ids)}, sampled_token_ids=sampled
        )
        started = time.perf_counter_ns()
        self._scheduler.update_from_output(output, result)
        took += time.perf_counter_ns() - started
        for _ in range(self._count - len(requests)):
            self._arrive(new=False)
        return took

    def _arrive(self, *, new: bool = True) -> None:
        asked = self._workload.next()
        request = Request(
            request_id=str(asked.number),
            prompt_token_ids=asked.prompt_ids.tolist(),
            sampling_params=SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True),
            pooling_params=None,
            priority=-asked.priority,
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)
        self._count += new


def _samples(request: Request) -> bool:
    """Whether the scheduled step computes all that the request has."""
    return bool(request.num_computed_tokens >= request.num_tokens)


def _scheduler(rows: int, policy: str) -> Scheduler:
    folder = tempfile.mkdtemp(prefix="jitney-bench-vllm-")
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=CONTEXT_TOKENS)
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    scheduler = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=CONTEXT_TOKENS,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        policy=policy,
    )
    config = VllmConfig(
        model_config=model, cache_config=cache, scheduler_config=scheduler, device_config=DeviceConfig(device="cpu")
    )
    cache.num_gpu_blocks = POOL_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=16, dtype=torch.float16)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=POOL_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=False,
    )


def main() -> None:
    """Answers until stdin ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what vLLM prints is no answer
    side: Side | None = None
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        if "build" in asked:
            gc.unfreeze()
            side = None
            side = Side(**asked["build"])
            answer: dict[str, Any] = {"running": side.running, "waiting": side.waiting}
        else:
            assert side is not None
            answer = {"ns": [side.step() for _ in range(asked["steps"])], "running": side.running}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
