"""Stages of gpu_check with a model: decode over batch sizes, beside the floor and transformers; swap alone and beside.

The model has random weights, made on the device. A step reads all weights but the embedding, and the keys and values
of every row: the floor of its time is those bytes by the measured read ceiling.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench.gpu_common import BLOCK_TOKENS, Bench, Figures, OutOfTime, Stage, ratio
from bench.gpu_kernels import decode_step, tables_for
from executor_svc.attention import KVShape
from executor_svc.clock import MonotonicClock
from executor_svc.copies_device import DeviceCopies
from executor_svc.copies_streams import CopyStreams, CudaStreams, EmulatedStreams
from executor_svc.model.device_model import DeviceModel, build_device_model
from executor_svc.model.weights import Weights, required_shapes
from executor_svc.step_plan import StepPlan, drawn_by
from jitney.block_ops import Segment, handle
from jitney.ticket_ops import Slot

SWAP_JOB_BLOCKS = 64
SWAP_BATCH = 32


class Made:
    """The model, once it is made, and what it is measured by."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        sizes, config = bench.sizes, bench.sizes.model
        self.tokens = sizes.context + 4 * sizes.steps
        self.rows = max(sizes.batches)
        self.tables = tables_for(self.rows, self.tokens)
        shape = KVShape(1, config.layers, BLOCK_TOKENS, config.kv_heads, config.head_size, bench.dtype)
        self.swap_blocks = max(SWAP_JOB_BLOCKS, bench.sizes.swap_bytes // shape.block_bytes)
        self.step_blocks = int(self.tables.size)
        shape = replace(shape, blocks=self.step_blocks + self.swap_blocks)
        random = torch.Generator(device=bench.torch_device).manual_seed(7)
        tensors = {
            name: torch.empty(size, dtype=bench.dtype, device=bench.torch_device).normal_(0.0, 0.02, generator=random)
            if len(size) > 1
            else torch.ones(size, dtype=bench.dtype, device=bench.torch_device)
            for name, size in required_shapes(config).items()
        }
        self.weights = Weights("random-llama", "0", config, tensors)
        self.name = bench.names[0]
        backend = bench.backend(self.name, shape, config.heads)
        backend.pool.normal_(0.0, 0.5)
        self.model: DeviceModel = build_device_model(self.weights, backend, "bf16", max_rows=self.rows)

    def seconds_per_step(self, rows: int, steps: int) -> float:
        """Of decode steps of so many rows, queued one behind the other, each fed with what the last one drew."""
        tables = self.tables[:rows]
        plans = [
            decode_step(tables, [self.bench.sizes.context + 1 + at] * rows, drawn_by(np.arange(rows)))
            for at in range(steps + 3)
        ]
        for plan in plans[:2]:
            self.model.run(plan)
        self.bench.sync()
        began = perf_counter()
        last = self.model.submit(plans[2])
        for plan in plans[3:]:
            following = self.model.submit(plan)
            self.model.collect(last)
            last = following
        self.model.collect(last)
        return (perf_counter() - began) / (steps + 1)


def decode(bench: Bench, stage: Stage, results: Figures) -> Made:
    """Tokens a second over batch sizes, beside the floor; then transformers on the same weights."""
    began = perf_counter()
    made = Made(bench)
    stage.figures |= {"backend": made.name, "made_in_s": perf_counter() - began, "context": bench.sizes.context}
    config, ceiling = bench.sizes.model, results.get("ceilings", {}).get("device_bytes_per_s", 0.0)
    weight_bytes = made.model.llama.weight_bytes
    row_bytes = 2 * config.layers * config.kv_heads * config.head_size * bench.dtype.itemsize * bench.sizes.context
    stage.figures["waits_for_the_device"] = _waits(made)
    curve: list[Figures] = []
    stage.figures |= {"weight_bytes": weight_bytes, "kv_bytes_of_a_row": row_bytes, "batches": curve}
    for rows in bench.sizes.batches:
        stage.check()
        seconds = median(made.seconds_per_step(rows, bench.sizes.steps) for _ in range(3))
        floor = rows * ceiling / (weight_bytes + rows * row_bytes)
        curve.append(
            {
                "rows": rows,
                "seconds_per_step": seconds,
                "tokens_per_s": rows / seconds,
                "floor_tokens_per_s": floor,
                "share_of_floor": ratio(rows / seconds, floor),
            }
        )
    stage.figures["transformers"] = _transformers(made, stage)
    return made


def _waits(made: Made) -> dict[str, str | None]:
    """What in the queueing of each kind of step waits for the device; empty: nothing does. None: this is no GPU."""
    greedy = decode_step(made.tables[:2], [made.bench.sizes.context] * 2, np.zeros(2, np.int32))
    drawn = replace(greedy.sampling, temperature=np.ones(2, np.float32))
    filtered = replace(drawn, top_k=np.full(2, 8, np.int32), logprobs=np.full(2, 2, np.int32))
    ends = made.bench.sizes.context - BLOCK_TOKENS + np.arange(BLOCK_TOKENS, dtype=np.int32)  # of the prefilled row
    slots = made.tables[1, ends // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + ends % BLOCK_TOKENS
    mixed = replace(
        greedy,
        token_ids=np.zeros(1 + BLOCK_TOKENS, np.int32),
        positions=np.append(greedy.positions[:1], ends),
        write_slots=np.append(greedy.write_slots[:1], slots),
        query_start=np.array([0, 1, 1 + BLOCK_TOKENS], np.int32),
    )
    steps = {
        "greedy": greedy,
        "drawn": replace(greedy, sampling=drawn),
        "filtered": replace(greedy, sampling=filtered),
        "with_a_prefill": mixed,
    }
    return {name: _waits_in(made, plan) for name, plan in steps.items()}


def _waits_in(made: Made, plan: StepPlan) -> str | None:
    made.model.run(plan)
    if not made.bench.real:
        return None
    torch.cuda.set_sync_debug_mode("error")
    try:
        submitted = made.model.submit(plan)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made.model.collect(submitted)
    return ""


def _transformers(made: Made, stage: Stage) -> Figures:
    """Greedy decode steps by transformers on the same weights over caches of the same length; or why not."""
    if importlib.util.find_spec("transformers") is None:
        return {"absent": "transformers is not installed"}
    bench, config = made.bench, made.bench.sizes.model
    found: Figures = {}
    try:
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        shape = LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.hidden,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_size,
            max_position_embeddings=config.context_tokens,
            rms_norm_eps=config.norm_epsilon,
            tie_word_embeddings=False,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(shape)
        model.load_state_dict(dict(made.weights.tensors), assign=True)
        model.model.rotary_emb = LlamaRotaryEmbedding(shape).to(bench.torch_device)
        model.train(False)
        name = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
        for rows in (bench.sizes.batches[0], min(SWAP_BATCH, bench.sizes.batches[-1])):
            stage.check()
            cache = DynamicCache()
            size = (rows, config.kv_heads, bench.sizes.context, config.head_size)
            held = torch.randn(size, device=bench.torch_device).to(bench.dtype)
            for layer in range(config.layers):
                cache.update(held, held, layer)
            ids = torch.zeros((rows, 1), dtype=torch.long, device=bench.torch_device)
            with torch.inference_mode():
                seconds = bench.seconds(partial(_greedy, model, ids, {name: cache}), repeats=3)
            found[f"tokens_per_s_at_{rows}"] = rows / seconds
    except OutOfTime:
        raise
    except Exception as error:  # whatever another release does here must not end the check
        return found | {"absent": f"{type(error).__name__}: {error}"[:200]}
    return found


def _greedy(model: torch.nn.Module, ids: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
    tokens: torch.Tensor = model(ids, use_cache=True, **cache).logits.argmax(-1)
    return tokens


def swap(bench: Bench, stage: Stage, results: Figures, made: Made | None) -> None:
    """Blocks out to the CPU tier and in again, alone as a share of the pinned ceilings, then beside decode steps."""
    if made is None:
        raise RuntimeError("there is no model: the stage before has failed")
    ceilings = results.get("ceilings", {})
    backend = made.model.backend
    size = backend.shape.block_bytes
    with _memory() as path:
        count = made.swap_blocks
        swapping = _Swapping(made, path)
        try:
            swapping.round_trip()  # memory is registered, and touched
            for name, inward, ceiling in (("out", False, "to_host_bytes_per_s"), ("in", True, "to_device_bytes_per_s")):
                stage.check()
                seconds = median(swapping.seconds(inward) for _ in range(3))
                rate = count * size / seconds
                share = ratio(rate, ceilings.get(ceiling, 0.0))
                stage.figures[name] = {"bytes": count * size, "bytes_per_s": rate, "share": share}
            rows = min(SWAP_BATCH, made.rows)
            alone = median(made.seconds_per_step(rows, bench.sizes.steps) for _ in range(3))
            for name, inward in (("out", False), ("in", True)):
                stage.check()
                with swapping.always(inward) as moved:
                    beside = median(made.seconds_per_step(rows, bench.sizes.steps) for _ in range(3))
                stage.figures[f"decode_beside_{name}"] = {
                    "rows": rows,
                    "slower": ratio(beside - alone, alone),
                    "bytes_per_s": moved.bytes_per_s,
                }
        finally:
            swapping.copies.close()


@contextmanager
def _memory() -> Iterator[str]:
    """Path of a file in shared memory, as the CPU tier's are: CUDA registers no memory of a file on a disk."""
    fd = os.memfd_create("slots")
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


class _Swapping:
    """The blocks that no step uses, and as many slots."""

    def __init__(self, made: Made, path: str) -> None:
        backend, count = made.model.backend, made.swap_blocks
        size = backend.shape.block_bytes
        os.truncate(path, count * (size + 4))
        streams: CopyStreams
        if backend.in_use is None:
            streams = CudaStreams(backend.device)
        else:
            streams = EmulatedStreams(backend.pool, backend.in_use)
        self.copies = DeviceCopies(backend.pool, MonotonicClock(), streams)
        self.copies.attach([Segment(path, count * (size + 4), count, size)])
        self._size, self._count = size, count
        self._first = made.step_blocks
        self._job = 0

    def round_trip(self) -> None:
        """Out and in."""
        self.seconds(False)
        self.seconds(True)

    def seconds(self, inward: bool) -> float:
        """All blocks one way, in orders of SWAP_JOB_BLOCKS."""
        began = perf_counter()
        jobs = 0
        for first in range(0, self._count, SWAP_JOB_BLOCKS):
            self._order(first, inward)
            jobs += 1
        self._wait(jobs)
        return perf_counter() - began

    def _order(self, first: int, inward: bool) -> None:
        self._job += 1
        places = range(first, min(first + SWAP_JOB_BLOCKS, self._count))
        blocks = [handle(self._first + place, 1) for place in places]
        slots = [Slot(place) for place in places]
        if inward:
            self.copies.load(self._job, blocks, slots, [0] * len(slots))
        else:
            self.copies.store(self._job, blocks, slots, urgent=True)

    def _wait(self, jobs: int) -> None:
        while jobs:
            if self.copies.poll() is not None:
                jobs -= 1
            else:
                threading.Event().wait(0.0002)

    def always(self, inward: bool) -> _Always:
        """As a context: all blocks one way, again and again, on a thread."""
        return _Always(self, inward, self._count * self._size)


class _Always:
    """Swapping meanwhile; `bytes_per_s` afterwards."""

    def __init__(self, swapping: _Swapping, inward: bool, size: int) -> None:
        self._swapping, self._inward, self._size = swapping, inward, size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.bytes_per_s = 0.0

    def __enter__(self) -> _Always:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        times = []
        while not self._stop.is_set():
            times.append(self._swapping.seconds(self._inward))
        self.bytes_per_s = self._size / median(times) if times else 0.0
