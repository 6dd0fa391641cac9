"""What block accounting costs: a step's Apply and the look-up of a long prompt, beside vLLM 0.33's KVCacheManager.

    python -m bench.ledger [--quick] [--rounds 20] [--steps 8] [--no-vllm]

A step of 256 rows: 4 end, 16 complete a block, 16 begin one, 4 with prompts of 512 blocks of 16 tokens are admitted.
Ours: one batch with all of it, to a `Ledger` in this process (evicting by cost, our default, and LRU, as theirs does),
and over gRPC, on the one long stream of the executor's client, from the batch's encoding to its decoded answer. Theirs:
`free`, `allocate_slots` for every row that goes on, `get_computed_blocks` and `allocate_slots` for those that are
admitted; "touched" leaves out the rows for which nothing changes. Three mixes: of an admitted prompt nothing, half or
all is cached. What is not cached is sealed by our next batch, beside the 16 blocks of decoding; theirs caches it while
it allocates. A step that seals nothing but those 16 is the last mix: the first ratios are of it, those named `worst` of
the worst mix.

Hashing and look-up: the keys of 8,200 cached tokens and how much of the chain there is. Both use sha256, which is the
default of both; theirs with sha256_cbor is shown too.

Rounds of all take turns. Before the last line stand the same ratios of the fastest tenth of the steps, which say more
on a machine that is busy with other things. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.common import load_average, percentile
from bench.environments import NotToBeHad
from bench.ledger_rows import ROOT, Rows
from bench.ledger_workload import BLOCK_TOKENS, POOL_BLOCKS, PROMPT_BLOCKS, WARM_UP_STEPS
from bench.live_loop import SWITCH_S, on_clients_loop, services
from bench.vllm import VllmProcess
from cache_svc.blocks import BlockTable
from cache_svc.cost_order import ORDERS
from cache_svc.ledger import Ledger
from executor_svc.cache_client import CacheClient
from executor_svc.cache_pool import CachePool
from executor_svc.clock import MonotonicClock
from jitney.block_ops import Batch, BatchAnswer, Chain
from jitney.keys import chain

ALGORITHMS: Final = ("sha256_cbor", "sha256")
"""Of vLLM; the last one is its default, and what the ratio is over."""
HASHES: Final = 40
FASTEST: Final = 10.0
MIXES: Final = (0, PROMPT_BLOCKS // 2, PROMPT_BLOCKS)
Times = dict[str, list[float]]


class InProcess:
    """A ledger here. `eviction` names its order; the first is the service's default."""

    def __init__(self, eviction: str = "cost") -> None:
        self.ledger = Ledger(BlockTable(POOL_BLOCKS, order=ORDERS[eviction]), BLOCK_TOKENS)

    def apply(self, batch: Batch) -> tuple[BatchAnswer, int]:
        """Runs it."""
        began = time.perf_counter_ns()
        answer = self.ledger.apply(batch)
        return answer, time.perf_counter_ns() - began


class OverGrpc:
    """A ledger in the cache's process."""

    def __init__(self, cache: str) -> None:
        """`cache` is its address."""
        self._clock = MonotonicClock()
        incarnation = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
        pool = CachePool(f"bench-{incarnation}", incarnation, b"bench", POOL_BLOCKS, 1, BLOCK_TOKENS)
        self._client = CacheClient(cache, pool, self._clock)
        on_clients_loop(self._client.open())
        self.apply_us: list[int] = []

    def apply(self, batch: Batch) -> tuple[BatchAnswer, int]:
        """From here until its answer is here."""
        began = time.perf_counter_ns()
        self._client.send(batch)
        while (answer := self._client.poll()) is None:
            self._clock.wait(None)
        took = time.perf_counter_ns() - began
        if not isinstance(answer, BatchAnswer):
            raise RuntimeError(f"the cache said {answer}")
        self.apply_us.append(answer.apply_us)
        return answer, took

    def close(self) -> None:
        """Ends the client."""
        on_clients_loop(self._client.close())


class Mix:
    """All sides at one share of cached blocks, warm."""

    def __init__(self, common_blocks: int, cache: str, peer: VllmProcess | None) -> None:
        self.times: Times = defaultdict(list)
        self._common_blocks = common_blocks
        self._peer = peer
        self._here, self._there = InProcess(), OverGrpc(cache)
        self._rows = {
            "apply": Rows(common_blocks, self._here.apply),
            "apply_lru": Rows(common_blocks, InProcess("lru").apply),
            "apply_grpc": Rows(common_blocks, self._there.apply),
        }
        for rows in self._rows.values():
            for _ in range(WARM_UP_STEPS):
                rows.step()
        self._there.apply_us.clear()
        for name, rows in self._rows.items():
            self._check(name, rows.hit_blocks)
        if peer is not None:
            for algorithm in ALGORITHMS if common_blocks == PROMPT_BLOCKS else ALGORITHMS[-1:]:
                built = peer.ask(build={"common_blocks": common_blocks, "algorithm": algorithm})
                self._check("vllm", built["hit_blocks"])
                if algorithm != ALGORITHMS[-1]:
                    self._tell(f"vllm_hash_{algorithm}", peer.ask(hash=HASHES))
        gc.collect()
        gc.freeze()

    def round(self, steps: int) -> None:
        """So many steps of each side."""
        for name, rows in self._rows.items():
            self.times[name] += [rows.step() / 1e3 for _ in range(steps)]
        self._hash(steps)
        if self._peer is not None:
            self._tell("vllm", self._peer.ask(steps=steps))
            self._tell("vllm_hash", self._peer.ask(hash=steps))

    def close(self) -> None:
        """Ends what this has begun."""
        self.times["apply_in_server"] = [float(us) for us in self._there.apply_us]
        self._there.close()
        gc.unfreeze()

    def _hash(self, count: int) -> None:
        prompt, known = self._rows["apply"].newest()
        for _ in range(count):
            began = time.perf_counter_ns()
            keys = chain(ROOT, prompt, BLOCK_TOKENS)
            hashed = time.perf_counter_ns()
            hits = self._here.ledger.lookup(Chain(known.request, keys))
            ended = time.perf_counter_ns()
            self.times["hash"].append((hashed - began) / 1e3)
            self.times["hash_lookup"].append((ended - began) / 1e3)
        self._check("look-up", hits.device_blocks)

    def _check(self, name: str, hit_blocks: int) -> None:
        if hit_blocks != self._common_blocks:
            raise RuntimeError(f"{name}: {self._common_blocks} blocks of a prompt should be cached, {hit_blocks} are")

    def _tell(self, name: str, answer: dict[str, Any]) -> None:
        for kind, values in answer.items():
            if kind.endswith("ns"):
                self.times[f"{name}_{kind.removesuffix('ns')}".rstrip("_")] += [value / 1e3 for value in values]


def figures(times: Times, percent: float) -> dict[str, float]:
    """Microseconds of one percentile."""
    return {name: round(percentile(values, percent), 1) for name, values in times.items() if values}


@contextlib.contextmanager
def peer(wanted: bool) -> Iterator[VllmProcess | None]:
    """vLLM's side, or None and why."""
    try:
        process = VllmProcess("vllm_ledger_side.py") if wanted else None
    except NotToBeHad as error:
        print(f"no comparison: {error}", flush=True)
        process = None
    try:
        yield process
    finally:
        if process is not None:
            process.close()


def measure(rounds: int, steps: int, wanted: bool) -> dict[int, Times]:
    """Of each mix."""
    found: dict[int, Times] = {}
    with services("cache_svc") as (cache,), peer(wanted) as theirs:
        for common_blocks in MIXES:
            mix = Mix(common_blocks, cache.target, theirs)
            with contextlib.closing(mix):
                for _ in range(rounds):
                    mix.round(steps)
            found[common_blocks] = mix.times
            for name, percent in (("median", 50.0), ("fastest tenth", FASTEST)):
                shown = json.dumps(figures(mix.times, percent))
                print(f"{common_blocks:>4} of {PROMPT_BLOCKS} cached, {name}: {shown}", flush=True)
    return found


def ratios(found: dict[int, dict[str, float]]) -> dict[str, float | None]:
    """Ours over theirs: where prompts are cached, and in the worst of the mixes."""

    def ratio(ours: str, theirs: str, mixes: Sequence[int] = MIXES) -> float | None:
        values = [found[mix][ours] / found[mix][theirs] for mix in mixes if theirs in found[mix]]
        return round(max(values), 3) if values else None

    cached = MIXES[-1:]
    return {
        "apply_ratio": ratio("apply", "vllm", cached),
        "apply_grpc_ratio": ratio("apply_grpc", "vllm", cached),
        "hash_lookup8k_ratio": ratio("hash_lookup", "vllm_hash", cached),
        "apply_ratio_touched": ratio("apply", "vllm_touched", cached),
        "worst_apply_ratio": ratio("apply", "vllm"),
        "worst_apply_ratio_lru": ratio("apply_lru", "vllm"),
        "worst_apply_grpc_ratio": ratio("apply_grpc", "vllm"),
    }


def main(arguments: Sequence[str]) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.ledger", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--no-vllm", action="store_true", help="ours only")
    options = parser.parse_args(arguments)
    sys.setswitchinterval(SWITCH_S)
    print(f"us; {load_average()}", flush=True)
    found = measure(3 if options.quick else options.rounds, options.steps, not options.no_vllm)
    print(load_average())
    for percent in (FASTEST, 50.0):
        print(json.dumps(ratios({mix: figures(times, percent) for mix, times in found.items()})))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
