"""What batching gains: tokens/s and step latency of decoding, batch 1 to 128, beside the plain fp32 path.

    python -m bench.batching [--model PATH] [--context 256] [--pairs 15]

All paths run the same loop over the same weights. Ours: packed layers of the default arithmetic, paged native attention
over an fp16 pool, native row-wise kernels. Plain: `F.linear` in fp32, contexts gathered for torch's own attention layer
by layer, torch's row-wise operations. Tuned: the plain path with a gather of half the copies and our row-wise kernels,
so that only linear layers and attention differ. Steps of all are taken in turn; figures are medians, and a ratio is the
median of the ratios of neighbours. Beside each batch stands what this machine allows (roofline.py): its share is how
near ours comes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from bench.plain_attention import GatherAttention
from bench.roofline import measure_machine
from executor_svc.attention import AttentionBackend, KVShape
from executor_svc.kernels.elementwise import TorchElementwise, select_elementwise
from executor_svc.model.linear import Packer, pad_rows
from executor_svc.model.llama import Llama
from executor_svc.model.loader import load_weights
from executor_svc.model.model import CpuModel
from executor_svc.step_plan import SamplingRows, StepPlan
from jitney.models import default_model_path
from jitney.serving import config

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCK_TOKENS = 16
HEADLINE_BATCH = 32
LEAST_PAIRS = 3
LONGEST_S = 10.0  # of a batch size, once it has the least number of pairs


@dataclass(frozen=True, slots=True)
class Point:
    """One batch size. `fp32_*`: the plain path; `tuned_fp32_*`: the tuned one; `roofline_*`: what is allowed."""

    batch: int
    tokens_per_s: float
    step_ms: float
    fp32_tokens_per_s: float
    fp32_step_ms: float
    over_fp32: float
    tuned_fp32_step_ms: float
    over_tuned_fp32: float
    roofline_step_ms: float = 0.0
    of_roofline: float = 0.0

    def beside(self, roofline_s: float) -> Point:
        """With the floor of such a step."""
        floor_ms = roofline_s * 1e3
        return replace(self, roofline_step_ms=round(floor_ms, 2), of_roofline=round(floor_ms / self.step_ms, 2))


def decode_plan(batch: int, context: int, vocabulary: int) -> StepPlan:
    """One new token for each of `batch` rows, the last of `context`."""
    per_row = -(-context // BLOCK_TOKENS)
    table = np.random.default_rng(0).permutation(batch * per_row).astype(np.int32).reshape(batch, per_row)
    last = context - 1
    ids = np.random.default_rng(1).integers(0, vocabulary, batch).astype(np.int32)
    rows = np.arange(batch, dtype=np.int32)
    return StepPlan(
        step=0,
        token_ids=ids,
        positions=np.full(batch, last, np.int32),
        write_slots=table[:, last // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + last % BLOCK_TOKENS,
        query_start=np.arange(batch + 1, dtype=np.int32),
        context_tokens=np.full(batch, context, np.int32),
        block_table=table,
        table_rows=rows,
        sample_rows=rows,
        sampling=SamplingRows.greedy(batch),
    )


def fill(backend: AttentionBackend) -> None:
    """Puts plausible numbers into a pool: attention over zeros could be cheaper than it is."""
    block = torch.empty(backend.pool.shape[1:]).normal_(generator=torch.Generator().manual_seed(2))
    backend.pool[:] = block.to(backend.pool.dtype)


def measure(
    batch: int, context: int, paths: Sequence[Callable[[StepPlan], object]], pairs: int, vocabulary: int
) -> Point:
    """Steps of every path in turn, after one of each to warm up."""
    plan = decode_plan(batch, context, vocabulary)
    for run in paths:
        run(plan)
    times: list[list[float]] = []
    until = perf_counter() + LONGEST_S
    while len(times) < LEAST_PAIRS or (len(times) < pairs and perf_counter() < until):
        row = []
        for run in paths:
            started = perf_counter()
            run(plan)
            row.append(perf_counter() - started)
        times.append(row)
    ours, plain, tuned = (statistics.median(column) for column in zip(*times, strict=True))
    return Point(
        batch=batch,
        tokens_per_s=round(batch / ours, 1),
        step_ms=round(ours * 1e3, 2),
        fp32_tokens_per_s=round(batch / plain, 1),
        fp32_step_ms=round(plain * 1e3, 2),
        over_fp32=round(statistics.median(row[1] / row[0] for row in times), 2),
        tuned_fp32_step_ms=round(tuned * 1e3, 2),
        over_tuned_fp32=round(statistics.median(row[2] / row[0] for row in times), 2),
    )


def padding(multiple: int) -> dict[str, object]:
    """Rows of padding in percent of the rows that are wanted, over batch 16 to 128."""
    percent = {rows: 100.0 * (pad_rows(rows, multiple) - rows) / rows for rows in range(16, 129)}
    worst = max(percent, key=lambda rows: percent[rows])
    return {
        "row_multiple": multiple,
        "padding_mean_pct_16_128": round(statistics.fmean(percent.values()), 2),
        "padding_worst": {"rows": worst, "pct": round(percent[worst], 2)},
    }


def run(path: Path, context: int, batches: Sequence[int], pairs: int) -> dict[str, object]:
    """Loads both paths and measures every batch size."""
    blocks = max(batches) * -(-context // BLOCK_TOKENS)
    cache_dir = config.cache_dir()
    model = CpuModel.load(path, pool_blocks=blocks, block_tokens=BLOCK_TOKENS, cache_dir=cache_dir)
    weights = load_weights(path, cache_dir)
    sizes = weights.config
    shape = KVShape(blocks, sizes.layers, BLOCK_TOKENS, sizes.kv_heads, sizes.head_size, torch.float32)
    gather = GatherAttention(shape)
    fill(model.backend)
    fill(gather)
    plain = Llama(weights, Packer("fp32"), gather, TorchElementwise())
    tuned = plain.with_parts(gather.tune(), select_elementwise())

    def greedy_step(llama: Llama) -> Callable[[StepPlan], object]:
        def step(plan: StepPlan) -> object:
            logits = llama.forward(plan)
            return logits.argmax(dim=-1) if logits is not None else None

        return step

    machine = measure_machine()
    print(f"{path.name}: {model.info.fingerprint_text}; threads {torch.get_num_threads()}; context {context}")
    print(machine.describe())
    print(
        "batch   tokens/s   step ms | plain fp32: tokens/s   step ms   ratio | tuned: step ms   ratio"
        " | roofline: step ms   share"
    )
    curve = []
    for batch in batches:
        steps = (model.run, greedy_step(plain), greedy_step(tuned))
        point = measure(batch, context, steps, pairs, sizes.vocabulary).beside(machine.step_s(sizes, batch, context))
        print(
            f"{batch:5d} {point.tokens_per_s:10.1f} {point.step_ms:9.2f} | {point.fp32_tokens_per_s:20.1f} "
            f"{point.fp32_step_ms:9.2f} {point.over_fp32:7.2f} | "
            f"{point.tuned_fp32_step_ms:14.2f} {point.over_tuned_fp32:7.2f} | "
            f"{point.roofline_step_ms:17.2f} {point.of_roofline:7.2f}",
            flush=True,
        )
        curve.append(point)
    headline = next((point.over_fp32 for point in curve if point.batch == HEADLINE_BATCH), None)
    return {
        "curve": [asdict(point) for point in curve],
        "over_fp32_b32": headline,
        "read_gb_per_s": round(machine.read_bytes_per_s / 1e9, 1),
        "gflops": round(machine.flops / 1e9),
        **padding(model.info.row_multiple),
    }


def main() -> int:
    """Parses the command line, prints the table and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.batching", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--model", type=Path, default=None, help="GGUF file or directory; default: what `make model` got"
    )
    parser.add_argument("--context", type=int, default=256, help="tokens that every row attends to")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--pairs", type=int, default=15, help="most steps of each path at each batch size")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = run(options.model or default_model_path(), options.context, options.batches, options.pairs)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
