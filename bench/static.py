"""Continuous batching against static batches, chunked prefill, and horizons, on the real model.

    python -m bench.static [--model PATH] [--lengths FILE.csv] [--requests 96] [--quick]

The executor's loop runs in this process, without a front door, beside a real scheduler and a real cache process. All
requests are there at the start, in one order, with lengths shaped like ShareGPT's and scaled to fit this machine; each
is generated to its full length. A static batch collects what waits, as many as there are rows, and runs to its end
together; rows that ended are computed as padding, or dropped. `--lengths` takes a CSV file whose columns are
num_prefill_tokens and num_decode_tokens, or prompt_len and output_len. The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bench.common import load_average
from bench.live_loop import LiveLoop, Silence, services
from executor_svc.clock import MonotonicClock
from executor_svc.live_request import LiveRequest
from executor_svc.model.model import CpuModel
from executor_svc.model_runner import ModelRunner
from executor_svc.request import Submission
from jitney.models import default_model_path
from jitney.serving import config
from jitney.snapshot import Batching, HorizonKind, Settings

SHAPE = Path(__file__).with_name("data") / "sharegpt.json"
ROWS = 8
BLOCK_TOKENS = 16
POOL_BLOCKS = 1024
MEAN_OUTPUT = 48
MEAN_PROMPT = 24
LONG_PROMPT = 2000
DECODES = 10
HORIZONS = (1, 2, 5, 10)
COLUMNS = (("num_prefill_tokens", "num_decode_tokens"), ("prompt_len", "output_len"))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each request."""

    prompt: Sequence[int]
    output: Sequence[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way of batching did with all requests."""

    tokens_per_s: float
    ttft_ms: float
    completion_ms: float


def lengths(path: Path | None, count: int, seed: int = 0) -> Lengths:
    """Drawn from a file, or from the built-in quantiles; scaled to means that suit this machine.

    The prompts of the source hold their conversation's history, which a prefix cache has: they are scaled more.
    """
    draw = np.random.default_rng(seed)
    if path is None:
        shape = json.loads(SHAPE.read_text())
        u, v = draw.uniform(0, 100, (2, count))
        prompt = np.interp(u, shape["percent"], shape["prompt_tokens"])
        output = np.interp(v, shape["percent"], shape["output_tokens"])
        means = [np.trapezoid(shape[name], shape["percent"]) / 100 for name in ("prompt_tokens", "output_tokens")]
    else:
        table = np.array(_rows_of(path), float)
        prompt, output = table[draw.choice(len(table), count)].T
        means = table.mean(axis=0).tolist()
    scaled = (
        np.maximum(1, np.rint(values * wanted / mean)).astype(int).tolist()
        for values, wanted, mean in ((prompt, MEAN_PROMPT, means[0]), (output, MEAN_OUTPUT, means[1]))
    )
    return Lengths(*scaled)


def _rows_of(path: Path) -> list[list[float]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for names in COLUMNS:
        if rows and all(name in rows[0] for name in names):
            return [[float(row[name]) for name in names] for row in rows]
    raise SystemExit(f"{path} has neither of the columns {' nor '.join(' and '.join(names) for names in COLUMNS)}")


class Client:
    """Requests of one run, and when their tokens came."""

    def __init__(self, live: LiveLoop, vocabulary: int) -> None:
        self._live = live
        self._vocabulary = vocabulary
        self._draw = np.random.default_rng(1)
        self.requests: list[LiveRequest] = []
        self.times_ns: dict[int, list[int]] = {}

    def submit(self, prompt: int, output: int) -> LiveRequest:
        """A request of random tokens that is generated to its full length."""
        number = len(self.requests)
        ids = self._draw.integers(10, self._vocabulary, prompt).astype(np.int32)
        asked = Submission(client_id=f"r{number}", prompt_ids=ids, max_tokens=output, text=Silence())
        request = self._live.submit(asked, self._heard)
        self.requests.append(request)
        self.times_ns[request.id] = []
        return request

    def _heard(self, request: LiveRequest) -> None:
        times = self.times_ns[request.id]
        times += [time.perf_counter_ns()] * (len(request.answer.token_ids) - len(times))

    def run_until_idle(self) -> None:
        """Until all have ended."""
        while any(request.answer.finish is None for request in self.requests):
            self._live.loop.tick()

    def gaps_ms(self, request: LiveRequest) -> list[float]:
        """Times between its tokens."""
        return [(b - a) / 1e6 for a, b in itertools.pairwise(self.times_ns[request.id])]


@dataclass(frozen=True, slots=True)
class Bench:
    """The model and the addresses of the services."""

    model: CpuModel
    scheduler: str
    cache: str

    def settings(self) -> Settings:
        """Eight rows, continuous."""
        return Settings(
            max_rows=ROWS,
            max_step_tokens=128,
            chunk_cap_tokens=64,
            block_tokens=BLOCK_TOKENS,
            context_tokens=self.model.info.context_tokens,
        )

    def live(self, settings: Settings) -> LiveLoop:
        """A loop with these settings."""

        def runner(clock: MonotonicClock) -> ModelRunner:
            return ModelRunner(self.model, clock)

        return LiveLoop(self.scheduler, self.cache, settings, POOL_BLOCKS, runner)

    def serve(self, settings: Settings, asked: Lengths) -> Outcome:
        """All requests at once."""
        with self.live(settings) as live:
            client = Client(live, self.model.info.vocabulary)
            started = time.perf_counter_ns()
            for prompt, output in zip(asked.prompt, asked.output, strict=True):
                client.submit(prompt, output)
            client.run_until_idle()
            took_s = (time.perf_counter_ns() - started) / 1e9
            times = client.times_ns.values()
            return Outcome(
                tokens_per_s=sum(asked.output) / took_s,
                ttft_ms=statistics.fmean(t[0] - started for t in times) / 1e6,
                completion_ms=statistics.fmean(t[-1] - started for t in times) / 1e6,
            )

    def gap_ms(self, *, chunked: bool) -> float:
        """The largest gap that ten decodes see when a long prompt arrives beside them."""
        step = 128 if chunked else LONG_PROMPT + DECODES
        settings = replace(
            self.settings(), max_rows=DECODES + 1, max_step_tokens=step, chunk_cap_tokens=64 if chunked else step
        )
        with self.live(settings) as live:
            client = Client(live, self.model.info.vocabulary)
            # Chunked, the prompt takes many steps: the decodes must outlast it.
            decodes = [client.submit(8, 24 + (LONG_PROMPT // 32 if chunked else 0)) for _ in range(DECODES)]
            while any(len(request.answer.token_ids) < 8 for request in decodes):
                live.loop.tick()
            seen = {request.id: len(request.answer.token_ids) - 1 for request in decodes}
            client.submit(LONG_PROMPT, 1)
            client.run_until_idle()
            return max(max(client.gaps_ms(request)[seen[request.id] :]) for request in decodes)


def run(bench: Bench, asked: Lengths) -> dict[str, object]:
    """All comparisons, one after another."""
    continuous = bench.settings()
    found: dict[str, Outcome] = {}
    for name, settings in (
        ("continuous", continuous),
        ("static_padded", replace(continuous, batching=Batching.STATIC_PADDED)),
        ("static_dropping", replace(continuous, batching=Batching.STATIC_DROPPING)),
        *((f"horizon {n}", replace(continuous, horizon_kind=HorizonKind.STEPS, horizon_steps=n)) for n in HORIZONS),
    ):
        found[name] = outcome = bench.serve(settings, asked)
        print(
            f"{name:16} {outcome.tokens_per_s:8.1f} tokens/s, mean TTFT {outcome.ttft_ms:8.0f} ms, "
            f"mean completion {outcome.completion_ms:8.0f} ms",
            flush=True,
        )
    ours, padded, dropping = (found[name] for name in ("continuous", "static_padded", "static_dropping"))
    gaps = {name: round(bench.gap_ms(chunked=name == "chunked"), 1) for name in ("chunked", "unchunked")}
    print(f"largest gap of {DECODES} decodes beside a prompt of {LONG_PROMPT} tokens: {gaps} ms")
    return {
        "vs_padded_throughput": round(ours.tokens_per_s / padded.tokens_per_s, 2),
        "vs_dropping_throughput": round(ours.tokens_per_s / dropping.tokens_per_s, 2),
        "vs_padded_completion": round(ours.completion_ms / padded.completion_ms, 2),
        "gap_ms": gaps,
        "horizon": [
            {
                "n": n,
                "tokens_per_s": round(found[f"horizon {n}"].tokens_per_s, 1),
                "ttft_ms": round(found[f"horizon {n}"].ttft_ms, 1),
                "completion_ms": round(found[f"horizon {n}"].completion_ms, 1),
            }
            for n in HORIZONS
        ],
    }


def main() -> int:
    """Prints a line a run and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.static", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=None, help="default: what `make model` got")
    parser.add_argument("--lengths", type=Path, default=None, help="CSV of lengths; default: ShareGPT's quantiles")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="16 requests")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    asked = lengths(options.lengths, 16 if options.quick else options.requests)
    model = CpuModel.load(
        options.model or default_model_path(),
        pool_blocks=POOL_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        cache_dir=config.cache_dir(),
    )
    print(
        f"{len(asked.output)} requests, {sum(asked.prompt)} prompt and {sum(asked.output)} output tokens, {ROWS} rows; "
        f"{load_average()} at the start"
    )
    with services("scheduler_svc", "cache_svc") as (scheduler, cache):
        figures = run(Bench(model, scheduler.target, cache.target), asked)
    print(f"{load_average()} at the end")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
