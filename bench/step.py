"""Where a steady step's time goes, and what the whole stack costs over the bare forward pass.

    python -m bench.step [--model PATH] [--rounds 5] [--parts-only]

The parts: steps that decode one token in each of 1, 8 and 32 rows, at contexts of 256 and 1,024, on prepared plans,
with a clock at each part of the model. Beside attention stands the time in which this machine reads its keys and values
as fp32 (roofline.py); they are fp16 in the pool. These steps are greedy; sampling.py says what other rows take to draw.

The stack: three services as `jitney serve` starts them, and 32 streams that this process reads and throws away, all on
this machine's cores; a steady step is one in which all 32 rows decode, and each is decided on (`--horizon=steps`). In
turn with it, while it idles, the bare forward pass of the same rows and mean context on prepared plans. CPU time of a
step is what each process used in a round, over its steps. Ratios are medians over the rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench import sampling
from bench.batching import BLOCK_TOKENS, decode_plan, fill
from bench.common import load_average
from bench.reader import Reader
from bench.roofline import measure_machine
from bench.step_parts import PARTS, TimedModel
from executor_svc.model.model import CpuModel
from jitney.executor.v1 import executor_pb2 as pb
from jitney.executor.v1 import executor_pb2_grpc
from jitney.models import default_model_path
from jitney.serving import channels, config
from jitney.supervisor import ServeOptions, Supervisor

BATCHES = (1, 8, 32)
CONTEXTS = (256, 1024)
ROWS = 32
CONTEXT = 256
PROMPT_TOKENS = 208
NEW_TOKENS = 96
"""Prompt and half of the answer: CONTEXT."""
POOL_BLOCKS = 2048
STEPS = 15
BARE_STEPS = 10
GENERATE = "/jitney.executor.v1.Executor/Generate"


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the stack beside the bare forward pass: milliseconds a step, and CPU time a step by process."""

    stack_ms: float
    bare_ms: float
    cpu_ms: dict[str, float]


def parts(model: CpuModel) -> dict[tuple[int, int], dict[str, float]]:
    """Milliseconds of each part, and of the whole, by batch and context."""
    timed = TimedModel(model.llama)
    found = {}
    for batch in BATCHES:
        for context in CONTEXTS:
            plan = decode_plan(batch, context, model.info.vocabulary)
            timed.run(plan)
            steps = [timed.run(plan) for _ in range(STEPS)]
            point = {part: 1e3 * statistics.median(step[part] for step in steps) for part in PARTS}
            point["whole"] = 1e3 * statistics.median(sum(step.values()) for step in steps)
            found[batch, context] = point
            times = " ".join(f"{part} {point[part]:6.2f}" for part in PARTS)
            print(f"batch {batch:2d}, context {context:4d}: step {point['whole']:7.2f} ms: {times}", flush=True)
    return found


class Streams:
    """Clients of an executor: each asks for one answer and throws away what it reads."""

    def __init__(self, target: str, vocabulary: int) -> None:
        self._target = target
        self._reader = Reader(target, GENERATE)
        draw = np.random.default_rng(3)
        self._prompts = [draw.integers(10, vocabulary, PROMPT_TOKENS).tolist() for _ in range(ROWS)]
        self._step = 0

    def run(self, new_tokens: int) -> list[pb.StepRecord]:
        """All answers at once, each of so many tokens; the steady steps."""
        before = self._reader.messages
        requests = []
        for prompt in self._prompts:
            request = pb.GenerateRequest(max_tokens=new_tokens, ignore_eos=True)
            request.token_ids.ids.extend(prompt)
            requests.append(request.SerializeToString())
        self._reader.run(requests)
        if self._reader.messages - before < ROWS * new_tokens // 2:  # a message may hold several tokens
            raise RuntimeError(f"{self._reader.messages - before} messages came for {ROWS} x {new_tokens} tokens")
        with channels.sync_channel(self._target) as channel:
            stub: Any = executor_pb2_grpc.ExecutorStub(channel)
            status = stub.GetStatus(pb.GetStatusRequest(history_steps=10 * NEW_TOKENS))
        steps = [s for s in status.history if s.step > self._step and s.rows == ROWS and s.tokens == ROWS]
        self._step = status.step
        return steps

    def close(self) -> None:
        """Of the connection."""
        self._reader.close()


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bare(model: CpuModel) -> Callable[[], float]:
    """Seconds of some steps of the forward pass alone, and of what it draws."""
    plan = decode_plan(ROWS, CONTEXT, model.info.vocabulary)
    model.run(plan)

    def steps() -> float:
        started = perf_counter()
        for _ in range(BARE_STEPS):
            model.run(plan)
        return perf_counter() - started

    return steps


def stack(supervisor: Supervisor, model: CpuModel, rounds: int) -> list[Round]:
    """Rounds of the running services, with the bare forward pass before and after each."""
    streams = Streams(supervisor.executor_target, model.info.vocabulary)
    pids = {**supervisor.pids, "clients": os.getpid()}
    bare_steps = bare(model)
    found = []
    streams.run(1)  # prompts are cached from here on
    before = bare_steps()
    for _ in range(rounds):
        used = {name: cpu_s(pid) for name, pid in pids.items()}
        steps = streams.run(NEW_TOKENS)
        used = {name: cpu_s(pid) - used[name] for name, pid in pids.items()}
        after = bare_steps()
        period_us = (steps[-1].at_us - steps[0].at_us) / (steps[-1].step - steps[0].step)
        bare_ms = 1e3 * (before + after) / (2 * BARE_STEPS)
        cpu_ms = {name: 1e3 * seconds / NEW_TOKENS for name, seconds in used.items()}
        found.append(Round(period_us / 1e3, bare_ms, cpu_ms))
        shares = ", ".join(f"{name} {ms:.1f}" for name, ms in cpu_ms.items())
        print(
            f"{len(steps)} steady steps: {period_us / 1e3:.2f} ms each, bare {bare_ms:.2f} ms, "
            f"ratio {period_us / 1e3 / bare_ms:.3f}; CPU ms a step: {shares}",
            flush=True,
        )
        before = after
    streams.close()
    return found


def serve(model: CpuModel, path: Path, threads: int, rounds: int) -> list[Round]:
    """Starts the services, and measures."""
    with tempfile.TemporaryDirectory(prefix="jitney-bench-") as folder:
        options = ServeOptions(
            state_dir=Path(folder),
            grace_s=1.0,
            executor_args=(
                *(f"--model={path}", f"--threads={threads}", f"--pool-blocks={POOL_BLOCKS}"),
                *(f"--block-tokens={BLOCK_TOKENS}", f"--max-rows={ROWS}", "--horizon=steps"),
            ),
        )
        with Supervisor(options) as supervisor:
            return stack(supervisor, model, rounds)


def run(path: Path, rounds: int, *, parts_only: bool) -> dict[str, object]:
    """Parts first, then the stack."""
    blocks = ROWS * max(CONTEXTS) // BLOCK_TOKENS
    cache_dir = config.cache_dir()
    model = CpuModel.load(path, pool_blocks=blocks, block_tokens=BLOCK_TOKENS, cache_dir=cache_dir)
    fill(model.backend)
    machine = measure_machine()
    print(f"{path.name}: {model.info.fingerprint_text}; {load_average()}")
    print(machine.describe())
    found = parts(model)
    floor_ms = 1e3 * machine.attention_s(model.config, ROWS, max(CONTEXTS))
    over_floor = found[ROWS, max(CONTEXTS)]["attention"] / floor_ms
    print(f"attention at batch {ROWS}, context {max(CONTEXTS)}: {over_floor:.2f} of the fp32 floor, {floor_ms:.2f} ms")
    drawn = sampling.measure(model, path, STEPS)
    measured = [] if parts_only else serve(model, path, machine.threads, rounds)
    ratios = [each.stack_ms / each.bare_ms for each in measured]
    return {
        "stack_over_bare_b32": round(statistics.median(ratios), 3) if ratios else None,
        "attention_over_fp32_floor": round(over_floor, 2),
        "sampling_us": {kind: times["native"] for kind, times in drawn.items()},
        "step_ms": {str(batch): round(found[batch, CONTEXT]["whole"], 2) for batch in BATCHES},
    }


def main() -> int:
    """Prints the parts, the rounds and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=None, help="default: what `make model` got")
    parser.add_argument("--rounds", type=int, default=5, help="of the stack")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--parts-only", action="store_true", help="no services")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = run(options.model or default_model_path(), options.rounds, parts_only=options.parts_only)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
