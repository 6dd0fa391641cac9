"""How long a step's tokens take to draw, by the native kernel and row by row in numpy, in turn.

    python -m bench.sampling [--model PATH] [--rounds 20]

The logits are the model's after tokens of prose, in 1, 8 and 32 rows, and of noise (`flat`: where nearly every token is
likely enough to count) in as many. Times are medians over the rounds; the last line is JSON, microseconds a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from bench.common import load_average
from bench.quality import TEXT, read
from executor_svc.kernels.elementwise import select_elementwise
from executor_svc.model.model import CpuModel
from executor_svc.sampling import NumpySampler, select_sampler
from executor_svc.step_plan import SamplingRows
from executor_svc.tokenizer import load_tokenizer
from jitney.models import default_model_path
from jitney.serving import config

BATCHES = (1, 8, 32)
PROSE_TOKENS = 96
POOL_BLOCKS = 16
TEMPERATURE = 0.8


def asked(rows: int, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, logprobs: int = -1) -> SamplingRows:
    """The same settings for each of the rows, seeds of their own."""
    return SamplingRows(
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        min_p=np.zeros(rows, np.float32),
        seed=np.arange(rows, dtype=np.uint64),
        choice=np.zeros(rows, np.int32),
        position=np.zeros(rows, np.int32),
        logprobs=np.full(rows, logprobs, np.int32),
    )


def kinds(rows: int) -> dict[str, SamplingRows]:
    """What is asked of a step."""
    return {
        "greedy": asked(rows),
        "temperature": asked(rows, TEMPERATURE),
        "top_p 0.9": asked(rows, TEMPERATURE, top_p=0.9),
        "top_k 50, top_p 0.95": asked(rows, TEMPERATURE, top_k=50, top_p=0.95),
        "greedy, logprobs 5": asked(rows, logprobs=5),
    }


def measure(model: CpuModel, path: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds a step, of each kind and number of rows: `native` and `numpy`."""
    ids = load_tokenizer(path).encode(TEXT.read_text(encoding="utf-8"))[:PROSE_TOKENS]
    prose = read(model, ids)[-max(BATCHES) :]
    flat = torch.randn(prose.shape, generator=torch.Generator().manual_seed(0))
    samplers = {"native": select_sampler(model.llama.elementwise), "numpy": NumpySampler(model.llama.elementwise)}
    found = {}
    for batch in BATCHES:
        asking = {kind: (prose[:batch], rows) for kind, rows in kinds(batch).items()}
        asking["flat, top_p 0.9"] = (flat[:batch], kinds(batch)["top_p 0.9"])
        for kind, (logits, rows) in asking.items():
            times: dict[str, list[float]] = {name: [] for name in samplers}
            for _ in range(rounds):
                for name, sampler in samplers.items():
                    started = perf_counter()
                    sampler.draw(0, logits, rows)
                    times[name].append(1e6 * (perf_counter() - started))
            point = {name: round(statistics.median(each), 1) for name, each in times.items()}
            found[f"{batch} rows, {kind}"] = point
            print(f"sampling, {batch:2d} rows, {kind}: " + ", ".join(f"{n} {t:.0f} us" for n, t in point.items()))
    return found


def main() -> int:
    """Prints each point and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.sampling", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=None, help="default: what `make model` got")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    path = options.model or default_model_path()
    model = CpuModel.load(path, pool_blocks=POOL_BLOCKS, cache_dir=config.cache_dir())
    print(f"{path.name}: {select_elementwise().describe()}, {torch.get_num_threads()} threads; {load_average()}")
    print(json.dumps(measure(model, path, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
