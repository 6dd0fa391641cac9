"""How many threads compute a step, and how many tokens of prompts it takes: measured at start, and kept.

Threads: decode steps with as many threads as there are cores, with three quarters of them, a half and so on; the fewest
that come near the fastest. Tokens: prompts in steps of 32, 64, 128 tokens and so on. Larger steps compute more tokens a
second, as the weights are read once a step, until arithmetic is all that counts; but rows that decode beside a prompt
wait for the whole step. So: the fewest tokens that come near the most tokens a second, among the steps that do not
take too long.

A calibration is kept under whatever decides speed: model, arithmetic, kernels, processor, cores. One that was measured
while other processes computed, or whose tries differ a lot, is not kept; beside others one thread looks better than
two, for as long as they are there, so that as many threads as cores are taken then.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Protocol

import numpy as np
import torch

from executor_svc.model.atomic_file import write_atomically
from executor_svc.model.model import CpuModel
from executor_svc.step_plan import SamplingRows, StepPlan

VERSION = 1
LEAST_TOKENS = 32
MOST_TOKENS = 2048
LONGEST_STEP_S = 0.25
NEAR = 0.98
TRIES = 3
UNEVEN = 1.5
MOST_OTHERS = 0.1
"""Cores that other processes may use while it is measured."""
CLOCK_S = 0.05
"""The system counts in hundredths of a second."""
DECODE_ROWS = 16
CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found, and the seconds by which: of a decode step by threads, of a prompt's step by tokens."""

    threads: int
    prompt_tokens: int
    decode_s: Mapping[int, float]
    prefill_s: Mapping[int, float]

    def described(self) -> dict[str, object]:
        """For the log, in milliseconds."""
        return {
            "threads": self.threads,
            "prompt_tokens": self.prompt_tokens,
            "decode_ms_by_threads": {n: round(1e3 * s, 2) for n, s in self.decode_s.items()},
            "prefill_ms_by_tokens": {n: round(1e3 * s, 1) for n, s in self.prefill_s.items()},
        }


def calibrate_cached(model: CpuModel, cores: int, cache_dir: Path) -> Calibration:
    """`calibrate`, remembered. Leaves torch's number of threads as it was."""
    key = f"{VERSION} {model.info.version} {model.info.fingerprint_text} {_processor()} {cores}"
    key += f" {model.info.pool_blocks}"
    path = cache_dir / "calibrations" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if kept := read_kept(path, key, cores):
        return kept
    others = Others()
    found, steady = calibrate(StepTimes(model), cores)
    disturbed = others.disturb()
    if disturbed:  # whoever computes beside us may be gone soon
        found = replace(found, threads=cores)
    if steady and not disturbed:
        content = json.dumps({"key": key, **asdict(found)}).encode()
        write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return found


def read_kept(path: Path, key: str, cores: int) -> Calibration | None:
    """What is kept there, if it is whole and could have been measured with so many cores."""
    try:
        entry = json.loads(path.read_bytes())
        if entry.pop("key") != key:
            return None
        times = {name: {int(n): float(s) for n, s in entry[name].items()} for name in ("decode_s", "prefill_s")}
        kept = Calibration(int(entry["threads"]), int(entry["prompt_tokens"]), **times)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return kept if 1 <= kept.threads <= cores and LEAST_TOKENS <= kept.prompt_tokens <= MOST_TOKENS else None


class Others:
    """What other processes of this machine compute from here on, by the system's own count."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._before = _others_s()

    def disturb(self) -> bool:
        """Whether it was so much that times say little; true where the system does not tell."""
        return not _others_s() - self._before <= CLOCK_S + MOST_OTHERS * (perf_counter() - self._began)


class Times(Protocol):
    """Seconds of steps."""

    most_tokens: int

    def decode(self, threads: int) -> float: ...
    def prefill(self, tokens: int, threads: int) -> float: ...


class StepTimes:
    """Seconds of steps of a model whose pool is not in use yet."""

    def __init__(self, model: CpuModel) -> None:
        self._model = model
        info = model.info
        self._row_blocks = -(-CONTEXT // info.block_tokens)
        self._rows = max(1, info.pool_blocks // self._row_blocks)
        row_tokens = min(self._row_blocks, info.pool_blocks) * info.block_tokens
        self._context = min(row_tokens, info.context_tokens)
        self.most_tokens = self._rows * self._context

    def decode(self, threads: int) -> float:
        """A step that decodes some rows, by so many threads."""
        return self._timed(_plan(self._model, min(self._rows, DECODE_ROWS), self._context, 1), threads)

    def prefill(self, tokens: int, threads: int) -> float:
        """A step of so many prompt tokens, at most `most_tokens`, in chunks."""
        chunk = min(tokens, self._context)
        return self._timed(_plan(self._model, tokens // chunk, chunk, chunk), threads)

    def _timed(self, plan: StepPlan, threads: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            started = perf_counter()
            self._model.run(plan)
            return perf_counter() - started
        finally:
            torch.set_num_threads(before)


def calibrate(times: Times, cores: int) -> tuple[Calibration, bool]:
    """Measures and chooses; and whether tries of the same were alike."""
    sizes = sorted({cores >> halvings for halvings in range(cores.bit_length())} | {max(1, cores * 3 // 4)})
    tries = _tries(times.decode, sizes)
    decode_s = {threads: min(each) for threads, each in tries.items()}
    threads = fewest_near(decode_s, {n: 1.0 / s for n, s in decode_s.items()})
    prefill_s: dict[int, float] = {}
    all_tries, tokens = list(tries.values()), LEAST_TOKENS
    while tokens <= min(MOST_TOKENS, times.most_tokens):
        all_tries.append([times.prefill(tokens, threads) for _ in range(TRIES)])
        prefill_s[tokens] = min(all_tries[-1])
        if prefill_s[tokens] > LONGEST_STEP_S:
            break
        tokens *= 2
    prompt_tokens = best_tokens(prefill_s) if prefill_s else LEAST_TOKENS
    steady = all(sorted(each)[TRIES // 2] <= UNEVEN * min(each) for each in all_tries)
    return Calibration(threads, prompt_tokens, decode_s, prefill_s), steady


def best_tokens(prefill_s: Mapping[int, float]) -> int:
    """The fewest tokens near the most tokens a second, among steps that are not too long; the least, if all are."""
    short = {tokens: s for tokens, s in prefill_s.items() if s <= LONGEST_STEP_S}
    return fewest_near(short, {n: n / s for n, s in short.items()}) if short else min(prefill_s)


def fewest_near(sizes: Mapping[int, float], rates: Mapping[int, float]) -> int:
    """The least size whose rate is near the best one."""
    return min(size for size in sizes if rates[size] >= NEAR * max(rates.values()))


def _tries(measure: Callable[[int], float], sizes: list[int]) -> dict[int, list[float]]:
    """Each size in turn, after one try of the largest that does not count."""
    measure(sizes[-1])
    tries: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(TRIES):
        for size in sizes:
            tries[size].append(measure(size))
    return tries


def _plan(model: CpuModel, rows: int, context: int, tokens: int) -> StepPlan:
    """The last `tokens` of `context` in each row, greedy."""
    size = model.info.block_tokens
    per_row = -(-context // size)
    table = np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
    positions = np.tile(np.arange(context - tokens, context, dtype=np.int32), rows)
    row_of = np.repeat(np.arange(rows), tokens)
    return StepPlan(
        step=0,
        token_ids=np.zeros(rows * tokens, np.int32),
        positions=positions,
        write_slots=table[row_of, positions // size].astype(np.int64) * size + positions % size,
        query_start=np.arange(rows + 1, dtype=np.int32) * tokens,
        context_tokens=np.full(rows, context, np.int32),
        block_table=table,
        table_rows=np.arange(rows, dtype=np.int32),
        sample_rows=np.arange(rows, dtype=np.int32),
        sampling=SamplingRows.greedy(rows),
    )


def _others_s() -> float:
    """CPU time of everything but this process; NaN if unknown."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except (OSError, ValueError):
        return math.nan
    user, nice, system, _idle, _io, interrupts, soft, stolen = (int(field) for field in fields[1:9])
    busy = user + nice + system + interrupts + soft + stolen
    return busy / os.sysconf("SC_CLK_TCK") - process_time()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
