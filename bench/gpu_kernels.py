"""Stages of gpu_check below the model: environment, correctness, ceilings, decode attention."""

from __future__ import annotations

import importlib.util
import math
import platform
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu_common import BLOCK_TOKENS, Bench, Figures, Stage, ratio
from executor_svc.attention import KVShape
from executor_svc.attention_device import DeviceAttention
from executor_svc.model.graphs import recorder_for
from executor_svc.step_plan import SamplingRows, StepPlan

TOLERANCES = {"cupy_cuda": 4e-3, "torch_cuda": 8e-3}
"""torch's attention rounds probabilities to the type of the values, too."""


def environment(bench: Bench, stage: Stage, results: Figures) -> None:
    """What is here, and whether a kernel launched into a captured graph does what it does outside."""
    figures = stage.figures
    figures["torch"], figures["python"] = torch.__version__, platform.python_version()
    figures["said"] = bench.said
    for package in ("cupy", "flashinfer", "transformers", "triton"):
        figures[package] = importlib.util.find_spec(package) is not None
    if bench.real:
        properties = torch.cuda.get_device_properties(bench.torch_device)
        figures["device"], figures["cuda"] = properties.name, torch.version.cuda
        figures["memory_bytes"], figures["processors"] = properties.total_memory, properties.multi_processor_count
    shape = KVShape(8, 1, BLOCK_TOKENS, 2, 64, bench.dtype)
    for name in bench.names:
        backend = bench.backend(name, shape, 4)
        backend.pool.copy_(torch.arange(8, device=bench.torch_device).view(-1, 1, 1, 1, 1, 1))
        sources, targets = backend.send(np.array([1, 2])), backend.send(np.array([5, 6]))
        replay = recorder_for(bench.torch_device).record(partial(backend.copy_sent, sources, targets))
        backend.pool[1:3] += 10
        replay()
        bench.sync()
        figures[f"{name}_in_graph"] = backend.pool[5:7].float().amax(dim=(1, 2, 3, 4, 5)).tolist() == [11.0, 12.0]


def decode_step(tables: NDArray[np.int32], contexts: Sequence[int], token_ids: NDArray[np.int32]) -> StepPlan:
    """A step of one token a row, at the end of its context; nobody draws anything but the likeliest."""
    rows = len(contexts)
    ends = np.array(contexts, np.int32)
    last = (ends - 1).astype(np.int64)
    slots = tables[np.arange(rows), last // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + last % BLOCK_TOKENS
    return StepPlan(
        step=1,
        token_ids=token_ids,
        positions=ends - 1,
        write_slots=slots,
        query_start=np.arange(rows + 1, dtype=np.int32),
        context_tokens=ends,
        block_table=tables,
        table_rows=np.arange(rows, dtype=np.int32),
        sample_rows=np.arange(rows, dtype=np.int32),
        sampling=SamplingRows.greedy(rows),
    )


def tables_for(rows: int, tokens: int, seed: int = 0) -> NDArray[np.int32]:
    """Shuffled blocks for so many rows of so many tokens."""
    width = -(-tokens // BLOCK_TOKENS)
    order = np.random.default_rng(seed).permutation(rows * width)
    return order.astype(np.int32).reshape(rows, width)


def correctness(bench: Bench, stage: Stage, results: Figures) -> None:
    """Decode rows of ragged contexts over a pool that is NaN elsewhere, every group and head size, against float64."""
    lengths = bench.sizes.check_lengths
    tables = tables_for(len(lengths), max(lengths))
    worst: dict[str, float] = {}
    for head_size in (64, 128):
        for kv_heads, group in ((2, 1), (3, 3), (2, 4), (1, 8)):
            stage.check()
            shape = KVShape(int(tables.size), 2, BLOCK_TOKENS, kv_heads, head_size, bench.dtype)
            for name in bench.names:
                backend = bench.backend(name, shape, kv_heads * group)
                error = _error(bench, backend, tables, lengths, kv_heads * group)
                worst[name] = max(worst.get(name, 0.0), error)
                stage.figures |= {f"{each}_error": value for each, value in worst.items()}
    stage.figures["tolerances"] = TOLERANCES
    stage.figures["right"] = all(error < TOLERANCES[name] for name, error in worst.items())


def _error(
    bench: Bench, backend: DeviceAttention, tables: NDArray[np.int32], lengths: Sequence[int], heads: int
) -> float:
    """The largest difference from float64 in layer 1, relative to values above 1."""
    shape, device = backend.shape, bench.torch_device
    random = torch.Generator(device=device).manual_seed(1)
    backend.pool.fill_(float("nan"))
    kv = [torch.randn((2, n, shape.kv_heads, shape.head_size), generator=random, device=device) for n in lengths]
    kv = [each.to(shape.dtype) for each in kv]
    for row, held in enumerate(kv):
        for at in range(0, lengths[row] - 1, BLOCK_TOKENS):
            part = held[:, at : min(at + BLOCK_TOKENS, lengths[row] - 1)]
            backend.pool[tables[row, at // BLOCK_TOKENS], 1, :, : part.shape[1]] = part
    q = torch.randn((len(lengths), heads, shape.head_size), generator=random, device=device).to(shape.dtype)
    out = torch.empty_like(q)
    planned = backend.plan(decode_step(tables, lengths, np.zeros(len(lengths), np.int32)))
    last = torch.stack([held[:, -1] for held in kv], dim=1)
    backend.write_kv(planned, 1, last[0].contiguous(), last[1].contiguous())
    backend.attend(planned, 1, q, out)
    bench.sync()
    worst = 0.0
    for row, held in enumerate(kv):
        k, v = held.double().repeat_interleave(heads // shape.kv_heads, dim=2)
        scores = torch.einsum("hd,thd->ht", q[row].double(), k) / math.sqrt(shape.head_size)
        expected = torch.einsum("ht,thd->hd", scores.softmax(dim=1), v)
        error = (out[row].double() - expected).abs() / expected.abs().clamp_min(1.0)
        worst = max(worst, float(error.nan_to_num(nan=math.inf).max()))
    return worst


def ceilings(bench: Bench, stage: Stage, results: Figures) -> None:
    """What the device can do at most: read, copy, talk to pinned memory, multiply."""
    sizes, device, figures = bench.sizes, bench.torch_device, stage.figures
    source = torch.zeros(sizes.ceiling_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    figures["read_bytes_per_s"] = source.nbytes / bench.seconds(source.sum)
    stage.check()
    figures["copy_bytes_per_s"] = 2 * source.nbytes / bench.seconds(lambda: target.copy_(source))
    stage.check()
    pinned = torch.zeros(sizes.pinned_bytes, dtype=torch.uint8, pin_memory=bench.real)
    there = torch.empty_like(pinned, device=device)
    figures["to_device_bytes_per_s"] = pinned.nbytes / bench.seconds(lambda: there.copy_(pinned, non_blocking=True))
    figures["to_host_bytes_per_s"] = pinned.nbytes / bench.seconds(lambda: pinned.copy_(there, non_blocking=True))
    stage.check()
    a, b = (torch.ones((sizes.gemm, sizes.gemm), dtype=bench.dtype, device=device) for _ in range(2))
    figures["gemm_flop_per_s"] = 2 * sizes.gemm**3 / bench.seconds(lambda: a @ b)
    # No kernel reads faster than the faster of the two, and neither alone is the ceiling on every device.
    figures["device_bytes_per_s"] = max(figures["read_bytes_per_s"], figures["copy_bytes_per_s"])


def attention(bench: Bench, stage: Stage, results: Figures) -> None:
    """Decode over 1 GB and more of keys and values a layer, as a share of the read ceiling, beside others."""
    sizes = bench.sizes
    heads, kv_heads, head_size = sizes.model.heads, sizes.model.kv_heads, sizes.model.head_size
    rows, context = sizes.attention_rows, sizes.attention_context
    tables = tables_for(rows, context)
    shape = KVShape(int(tables.size), sizes.attention_layers, BLOCK_TOKENS, kv_heads, head_size, bench.dtype)
    read = 2 * rows * context * kv_heads * head_size * bench.dtype.itemsize
    ceiling = results.get("ceilings", {}).get("device_bytes_per_s", 0.0)
    stage.figures |= {"rows": rows, "context": context, "kv_bytes": read}
    q = torch.randn((rows, heads, head_size), device=bench.torch_device).to(bench.dtype)
    out = torch.empty_like(q)
    plan = decode_step(tables, [context] * rows, np.zeros(rows, np.int32))
    for name in bench.names:
        stage.check()
        backend = bench.backend(name, shape, heads)
        backend.pool.normal_()
        planned = backend.plan(plan)

        def each_layer(backend: DeviceAttention = backend, planned: object = planned) -> None:
            for layer in range(shape.layers):
                backend.attend(planned, layer, q, out)

        seconds = bench.seconds(each_layer) / shape.layers
        stage.figures[name] = {
            "seconds": seconds,
            "bytes_per_s": read / seconds,
            "share": ratio(read / seconds, ceiling),
        }
        if name == "cupy_cuda" or "flashinfer" not in stage.figures:
            stage.figures["flashinfer"] = _flashinfer(bench, backend, tables, context, q, read, ceiling)
        del backend


def _flashinfer(
    bench: Bench,
    backend: DeviceAttention,
    tables: NDArray[np.int32],
    context: int,
    q: torch.Tensor,
    read: int,
    ceiling: float,
) -> Figures:
    """The same step by FlashInfer's paged decode, over the same bytes of one layer; or why not."""
    if not bench.real or importlib.util.find_spec("flashinfer") is None:
        return {"absent": "FlashInfer is not installed" if bench.real else "no GPU"}
    try:
        import flashinfer  # type: ignore[import-not-found]

        shape, device = backend.shape, bench.torch_device
        pool = backend.pool[:, 0].contiguous()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD", use_tensor_cores=True
        )
        starts = torch.arange(0, tables.size + 1, tables.shape[1], dtype=torch.int32, device=device)
        pages = torch.from_numpy(tables.reshape(-1)).to(device)
        last = torch.full((len(tables),), (context - 1) % BLOCK_TOKENS + 1, dtype=torch.int32, device=device)
        wrapper.plan(
            *(starts, pages, last, q.shape[1], shape.kv_heads, shape.head_size, BLOCK_TOKENS),
            q_data_type=q.dtype,
            kv_data_type=shape.dtype,
        )
        seconds = bench.seconds(lambda: wrapper.run(q, pool))
    except Exception as error:  # whatever a foreign package does here must not end the check
        return {"absent": f"{type(error).__name__}: {error}"[:200]}
    return {"seconds": seconds, "bytes_per_s": read / seconds, "share": ratio(read / seconds, ceiling)}
