"""The three services around a tiny model with small tiers below a small device pool, and what they say of hits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np

from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache.v1 import cache_pb2_grpc
from jitney.client import Client, Completion, Options
from jitney.supervisor import ServeOptions, Supervisor
from tests.support.tiny_llama import make_tiny_llama

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
"""Of the tiny model in fp16: 2 layers, 2 heads of 16."""
SSD_SLOT_BYTES = 2 * BLOCK_BYTES
"""With its header."""


def executor_flags(folder: Path, pool: int, seed: int = 0, *, slow: bool = False) -> tuple[str, ...]:
    """Of an executor of the tiny model with so many device blocks, that copies whatever can be copied: which tier a hit
    comes from does not depend on the machine. `slow`: of one that has blocks of the same size and computes longer."""
    hidden, heads = (256, 16) if slow else (64, 4)
    model = make_tiny_llama(folder / f"model-{seed}", context=1024, seed=seed, hidden=hidden, heads=heads)
    return (
        f"--model={model}",
        f"--cache-dir={folder / 'cache'}",
        "--threads=1",
        f"--pool-blocks={pool}",
        "--max-step-tokens=128",
        "--chunk-cap-tokens=64",
        "--max-rows=8",
        "--lower-tiers=always",
    )


def cache_flags(folder: Path, cpu: int, ssd: int) -> tuple[str, ...]:
    """Of a cache with so many blocks in its CPU tier and on its SSD; 0: none."""
    flags = (f"--cpu-bytes={cpu * BLOCK_BYTES}", "--audit-idle-s=0.2")
    if not ssd:
        return flags
    ssd_bytes = max(ssd * SSD_SLOT_BYTES, 1 << 20)
    return (*flags, f"--ssd-dir={folder / 'ssd'}", f"--ssd-bytes={ssd_bytes}", "--ssd-file-bytes=1048576")


@contextlib.contextmanager
def tiers(
    folder: Path,
    *,
    pool: int = 64,
    cpu: int = 128,
    ssd: int = 0,
    seed: int = 0,
    slow: bool = False,
    shared: Path | None = None,
    executor_args: Sequence[str] = (),
    cache_args: Sequence[str] = (),
) -> Iterator[Supervisor]:
    """All services SERVING, with so many blocks in each tier (`ssd` 0: none); the SSD's folder outlives them.

    `slow`: see executor_flags. `shared` is a folder for their shared memory in place of this user's.
    """
    both = () if shared is None else (f"--shared-dir={shared}",)
    number = sum(1 for _ in folder.glob("state-*"))
    options = ServeOptions(
        state_dir=folder / f"state-{number}",
        grace_s=1.0,
        start_timeout_s=120.0,
        executor_args=(*executor_flags(folder, pool, seed, slow=slow), *both, *executor_args),
        cache_args=(*cache_flags(folder, cpu, ssd), *both, *cache_args),
    )
    supervisor = Supervisor(options)
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.stop(at_once=True)


def prompt(seed: int, tokens: int) -> list[int]:
    """Random tokens, the same for the same arguments."""
    drawn: list[int] = np.random.default_rng(seed).integers(3, 500, tokens).tolist()
    return drawn


def ask(client: Client, ids: Sequence[int], max_tokens: int = 8, salt: str = "") -> Completion:
    """A greedy answer of that length."""
    return client.generate_once(list(ids), Options(max_tokens=max_tokens, ignore_eos=True, salt=salt))


def written_down(house: Supervisor) -> None:
    """Waits until the tiers below the device store nothing more: copies to them run behind the answers."""
    with grpc.insecure_channel(house.cache_target) as channel:
        stub = cache_pb2_grpc.CacheStub(channel)
        seen: list[int] = []
        while len(seen) < 4 or len(set(seen[-4:])) > 1:
            seen.append(sum(tier.stored_blocks for tier in stub.GetStatus(pb.GetStatusRequest()).tiers))
            time.sleep(0.1)


def cached(done: Completion) -> tuple[int, int, int]:
    """Cached tokens of its prompt: device, CPU tier, SSD."""
    usage = done.finished.usage
    return usage.cached_device_tokens, usage.cached_cpu_tokens, usage.cached_ssd_tokens
