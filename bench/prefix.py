"""Time to first token after a prefix hit in each tier, and hit rates of eviction orders on public traces.

    python -m bench.prefix [--model PATH] [--rounds 3] [--prefix 2000] [--new 50] [--conversation FILE ...]

The first half serves the real model with a device pool that holds one long prefix, a CPU tier that holds a few, and an
SSD: the same prefix is computed cold, then hit on the device; other prefixes push it down to the CPU tier, and further
to the SSD, whose reads go past the page cache; at last all three services are started anew. Each request has new tokens
behind the shared ones, and each hit must come from the tier that is measured, as its own usage says. The second half is
bench/prefix_traces.py. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench import prefix_traces
from bench.common import load_average
from executor_svc.attention import KVShape
from executor_svc.model.loader import load_weights
from jitney.client.sync import Client
from jitney.client.types import Delta, Finished, Options, Usage
from jitney.models import default_model_path
from jitney.serving import config
from jitney.supervisor import ServeOptions, Supervisor

BLOCK_TOKENS = 16
SPARE_BLOCKS = 8
"""Of the device pool beside one prompt: another one leaves next to nothing of the last."""
TIERS = ("device", "cpu", "ssd", "ssd_after_restart")


class Prefixes:
    """Prompts that share their first tokens; each call gives one with new tokens behind them."""

    def __init__(self, shared: int, new: int, vocabulary: int, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)
        self._shared, self._new, self._vocabulary = shared, new, vocabulary
        self._prefixes: list[list[int]] = []

    def fresh(self) -> int:
        """The number of a new prefix."""
        self._prefixes.append(self._draw.integers(10, self._vocabulary, self._shared).tolist())
        return len(self._prefixes) - 1

    def prompt(self, prefix: int) -> list[int]:
        """Of that prefix."""
        tail: list[int] = self._draw.integers(10, self._vocabulary, self._new).tolist()
        return self._prefixes[prefix] + tail


def ttft_ms(client: Client, prompt: Sequence[int]) -> tuple[float, Usage]:
    """Milliseconds until the first token has come, and the request's usage."""
    began, first, usage = time.perf_counter(), 0.0, Usage()
    for event in client.generate(prompt, Options(max_tokens=2, ignore_eos=True)):
        if isinstance(event, Delta) and not first:
            first = time.perf_counter()
        if isinstance(event, Finished):
            usage = event.usage
    return 1000 * (first - began), usage


class House:
    """The three services with small upper tiers, over an SSD folder that outlives them."""

    def __init__(self, folder: Path, model: Path, blocks: int, block_bytes: int) -> None:
        """`blocks` of `block_bytes` are those of a prompt."""
        self._folder, self._model = folder, model
        self._blocks, self._block_bytes = blocks, block_bytes
        self._starts = 0

    def start(self) -> Supervisor:
        """All three, serving."""
        self._starts += 1
        options = ServeOptions(
            state_dir=self._folder / f"state-{self._starts}",
            executor_args=(f"--model={self._model}", f"--pool-blocks={self._blocks + SPARE_BLOCKS}"),
            cache_args=(
                f"--cpu-bytes={self._block_bytes * self._blocks * 5 // 2}",
                f"--ssd-dir={self._folder / 'ssd'}",
                f"--ssd-bytes={self._block_bytes * self._blocks * 40}",
            ),
        )
        supervisor = Supervisor(options)
        supervisor.start()
        return supervisor


def measure(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each round, by what was hit."""
    sizes = load_weights(model, config.cache_dir()).config
    kv = KVShape(
        -(-(args.prefix + args.new) // BLOCK_TOKENS) + 1,
        sizes.layers,
        BLOCK_TOKENS,
        sizes.kv_heads,
        sizes.head_size,
        torch.float16,
    )
    prefixes = Prefixes(args.prefix, args.new, sizes.vocabulary)
    house = House(folder, model, kv.blocks, kv.block_bytes)
    found: dict[str, list[float]] = {name: [] for name in ("cold", *TIERS)}
    services = house.start()
    try:
        with Client(services.executor_target) as client:
            ttft_ms(client, prefixes.prompt(prefixes.fresh()))  # warms code and caches of the machine
            measured = [prefixes.fresh() for _ in range(args.rounds)]
            for prefix in measured:
                found["cold"].append(hit(client, prefixes, prefix, ""))
                found["device"].append(hit(client, prefixes, prefix, "device"))
                push_down(client, prefixes, prefixes.fresh())
                found["cpu"].append(hit(client, prefixes, prefix, "cpu"))
            for _ in range(4):
                push_down(client, prefixes, prefixes.fresh())
            for prefix in measured:
                found["ssd"].append(hit(client, prefixes, prefix, "ssd"))
    finally:
        services.stop()
    services = house.start()
    try:
        with Client(services.executor_target) as client:
            ttft_ms(client, prefixes.prompt(prefixes.fresh()))
            for prefix in measured:
                found["ssd_after_restart"].append(hit(client, prefixes, prefix, "ssd"))
    finally:
        services.stop()
    return found


def hit(client: Client, prefixes: Prefixes, prefix: int, tier: str) -> float:
    """Milliseconds to the first token; SystemExit unless most of the prefix came from that tier ("": none)."""
    took, usage = ttft_ms(client, prefixes.prompt(prefix))
    cached = {"device": usage.cached_device_tokens, "cpu": usage.cached_cpu_tokens, "ssd": usage.cached_ssd_tokens}
    wanted = len(prefixes.prompt(prefix)) * 9 // 10
    if (tier and cached[tier] < wanted) or (not tier and sum(cached.values()) > BLOCK_TOKENS):
        raise SystemExit(f"the prefix was to be hit in {tier or 'no tier'}, but cached were {cached}")
    print(f"  {tier or 'cold':8} {took:9.1f} ms   cached {cached}", flush=True)
    return took


def push_down(client: Client, prefixes: Prefixes, prefix: int) -> None:
    """Another prefix takes the place of the last one in the tiers above; copies get a moment to end."""
    ttft_ms(client, prefixes.prompt(prefix))
    time.sleep(1.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both halves; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix", type=int, default=2000, help="shared tokens")
    parser.add_argument("--new", type=int, default=50, help="tokens behind them")
    for name in prefix_traces.READERS:
        parser.add_argument(f"--{name}", type=Path, help="the trace's file, see bench/trace_files.py")
    args = parser.parse_args(argv)
    print(load_average())
    model = args.model or default_model_path(config.cache_dir())
    with tempfile.TemporaryDirectory(prefix="jitney-bench-", dir=config.cache_dir()) as name:
        found = measure(args, model, Path(name))
    cold = statistics.median(found["cold"])
    ratios = {tier: round(statistics.median(found[tier]) / cold, 3) for tier in TIERS}
    print(f"cold {cold:.0f} ms; " + ", ".join(f"{tier} {statistics.median(found[tier]):.0f}" for tier in TIERS))
    paths = {name: path for name in prefix_traces.READERS if (path := getattr(args, name)) is not None}
    traces = prefix_traces.run(paths) if paths else {}
    figures = ("hit_vs_infinite", "lru_to_belady_gap_closed", "worst_vs_lru")
    print(json.dumps({"ttft_ratio": ratios, **{name: traces.get(name) for name in figures}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
