"""vLLM's own decoder reads our events, where its environment was made (`make bench-decide` does)."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest

from bench import vllm
from cache_svc.index import Origin
from cache_svc.kv_events import NO_SALT, Cleared, Event, Medium, Removed, Stored
from cache_svc.kv_events_wire import encode
from jitney.keys import Key
from jitney.serving import config

PROGRAM = """
import sys, json, msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.Decoder(type=KVEventBatch).decode(sys.stdin.buffer.read())
stored = batch.events[1]
print(json.dumps([
    batch.ts, batch.data_parallel_rank, [type(event).__name__ for event in batch.events],
    [bytes(each).hex() for each in stored.block_hashes], stored.parent_block_hash, stored.token_ids,
    stored.block_size, stored.medium, [bytes(each).hex() for each in batch.events[2].block_hashes],
]))
"""


@pytest.mark.slow
def test_vllm_reads_our_events() -> None:
    python = config.cache_dir() / "bench-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("vLLM's environment was not made")
    keys = [Key(bytes([number]) * 32) for number in range(3)]
    tokens = bytearray(np.arange(4, dtype="<i4").tobytes())
    events: list[Event] = [
        Cleared(),
        Stored(Medium.DEVICE, keys[:2], None, tokens, Origin("default", NO_SALT, "model")),
        Removed(Medium.SSD, keys[2:]),
    ]
    done = subprocess.run(
        [str(python), "-P", "-c", PROGRAM],
        input=encode(1.5, events, 1),
        capture_output=True,
        env=vllm.variables(),
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert json.loads(done.stdout.decode().splitlines()[-1]) == [
        1.5,
        1,
        ["AllBlocksCleared", "BlockStored", "BlockRemoved"],
        [key.hex() for key in keys[:2]],
        None,
        [0, 1, 2, 3],
        2,
        "GPU",
        [keys[2].hex()],
    ]
