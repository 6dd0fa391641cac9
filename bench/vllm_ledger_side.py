"""vLLM's KVCacheManager, timed step by step; runs in an environment of its own, driven by `bench.ledger`.

Reads one JSON object a line from stdin, answers with one a line on stdout:

    {"build": {"common_blocks": 256, "algorithm": "sha256"}}   -> {"rows": 256, "hit_blocks": 256}
    {"steps": 20}                                              -> {"ns": [..], "touched_ns": [..]}
    {"hash": 20}                                               -> {"ns": [..], "hash_ns": [..], "hit_blocks": 512}

A step is what its scheduler asks of the manager: `free` for the rows that have ended, `allocate_slots` for each row
that goes on, `get_computed_blocks` and `allocate_slots` for each that is admitted. `touched_ns` leaves out the rows
that neither complete nor begin a block. Making requests, hashing and state updates lie outside the time taken.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

sys.path.insert(0, str(Path(__file__).parent))
from ledger_workload import (
    ADMITTED_A_STEP,
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    POOL_BLOCKS,
    ROWS,
    WARM_UP_STEPS,
    prompt,
)


class Side:
    """One manager with its rows."""

    def __init__(self, common_blocks: int, algorithm: str) -> None:
        self._common_blocks = common_blocks
        hash_fn = get_hash_fn_by_name(algorithm)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=16, dtype=torch.float16)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        self._manager = KVCacheManager(
            KVCacheConfig(num_blocks=POOL_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=CONTEXT_TOKENS,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            enable_caching=True,
        )
        self._rows: deque[Request] = deque()
        self._count = 0
        self.hit_blocks = 0
        for _ in range(WARM_UP_STEPS):
            self.step()
        gc.collect()
        gc.freeze()

    @property
    def rows(self) -> int:
        """Running requests."""
        return len(self._rows)

    def step(self) -> tuple[int, int]:
        """Nanoseconds of one step: all of it, and without the rows for which nothing changes."""
        manager = self._manager
        ended = [self._rows.popleft() for _ in range(ADMITTED_A_STEP if len(self._rows) == ROWS else 0)]
        touched = [row for row in self._rows if row.num_computed_tokens % BLOCK_TOKENS in (0, BLOCK_TOKENS - 1)]
        others = [row for row in self._rows if row.num_computed_tokens % BLOCK_TOKENS not in (0, BLOCK_TOKENS - 1)]
        admitted = [self._request() for _ in range(ADMITTED_A_STEP)]
        began = time.perf_counter_ns()
        for row in others:
            assert manager.allocate_slots(row, 1) is not None
        others_ns = time.perf_counter_ns() - began
        began = time.perf_counter_ns()
        for row in ended:
            manager.free(row)
        for row in touched:
            assert manager.allocate_slots(row, 1) is not None
        for row in admitted:
            blocks, hit, _ = manager.get_computed_blocks(row)
            assert manager.allocate_slots(row, row.num_tokens - hit, hit, blocks) is not None
        touched_ns = time.perf_counter_ns() - began
        self.hit_blocks = hit // BLOCK_TOKENS
        for row in (*self._rows, *admitted):
            row.num_computed_tokens = row.num_tokens
            row.append_output_token_ids(row.num_tokens)
        self._rows += admitted
        return others_ns + touched_ns, touched_ns

    def hash(self, count: int) -> dict[str, Any]:
        """Times of hashing and looking up a prompt that is cached, and of the hashing alone."""
        request = self._request(self._count)
        answer: dict[str, Any] = {"ns": [], "hash_ns": [], "hit_blocks": 0}
        for _ in range(count):
            request.block_hashes.clear()
            began = time.perf_counter_ns()
            hashes = self._hasher(request)
            hashed = time.perf_counter_ns()
            request.block_hashes.extend(hashes)
            _, hit, _ = self._manager.get_computed_blocks(request)
            ended = time.perf_counter_ns()
            answer["ns"].append(ended - began)
            answer["hash_ns"].append(hashed - began)
            answer["hit_blocks"] = hit // BLOCK_TOKENS
        return answer

    def _request(self, number: int | None = None) -> Request:
        if number is None:
            self._count += 1
            number = self._count
        return Request(
            request_id=str(number),
            prompt_token_ids=prompt(number, self._common_blocks).tolist(),
            sampling_params=SamplingParams(max_tokens=2 * ANSWER_TOKENS, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )


def main() -> None:
    """Answers until stdin ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what vLLM prints is no answer
    side: Side | None = None
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        answer: dict[str, Any]
        if "build" in asked:
            gc.unfreeze()
            side = None
            side = Side(**asked["build"])
            answer = {"rows": side.rows, "hit_blocks": side.hit_blocks}
        elif "hash" in asked:
            assert side is not None
            answer = side.hash(asked["hash"])
        else:
            assert side is not None
            times = [side.step() for _ in range(asked["steps"])]
            answer = {"ns": [all_ns for all_ns, _ in times], "touched_ns": [touched for _, touched in times]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
