"""Everything that is claimed of the GPU backends, measured on this machine's GPU in under five minutes.

    python -m bench.gpu_check [--tiny] [--seconds 280] [--out bench/results/gpu_check.json]

Stages, each with a deadline; what one has measured by then counts, and the next begins:

- environment: what is here; kernels under graph capture
- correctness: every backend against float64
- ceilings: device read and copy, pinned copies both ways, bf16 products
- attention: decode over 1 GB and more of keys and values, as a share of the read ceiling, beside FlashInfer where it is
  installed and beside gather + SDPA
- decode: tokens/s over batch 1 to 256 on a Llama-8B shape with random weights, beside the floor of the measured
  ceiling, and beside transformers on the same weights
- swap: blocks to and from the CPU tier, alone and beside decode steps

The last line is one JSON object, also written to --out: figures of each stage, and each goal with its figure. Without
a GPU, or with --tiny, everything runs on the CPU with emulated kernels at tiny sizes: that shows that the check works,
and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from bench.gpu_common import Bench, Figures, OutOfTime, Stage
from bench.gpu_kernels import attention, ceilings, correctness, environment
from bench.gpu_model import Made, decode, swap
from jitney.serving import logs

NO_GPU = "no GPU was used: sizes are tiny and kernels emulated; no figure here is a GPU's"
SHARES = {"environment": 0.1, "correctness": 0.15, "ceilings": 0.1, "attention": 0.15, "decode": 0.35, "swap": 0.15}
"""Of the time, at most."""
GRACE_S = 10.0
"""After which a stage that does not come to an end ends the check."""


class Check:
    """Runs the stages and keeps what they found."""

    def __init__(self, bench: Bench, seconds: float, out: Path) -> None:
        self.bench, self._seconds, self._out = bench, seconds, out
        self.results: Figures = {}
        self._made: Made | None = None

    def run(self) -> Figures:
        """All stages; the report."""
        stages: dict[str, Callable[[Stage], object]] = {
            "environment": lambda stage: environment(self.bench, stage, self.results),
            "correctness": lambda stage: correctness(self.bench, stage, self.results),
            "ceilings": lambda stage: ceilings(self.bench, stage, self.results),
            "attention": lambda stage: attention(self.bench, stage, self.results),
            "decode": self._decode,
            "swap": lambda stage: swap(self.bench, stage, self.results, self._made),
        }
        for name, run in stages.items():
            self.run_stage(name, run)
        return self._write()

    def _decode(self, stage: Stage) -> None:
        self._made = decode(self.bench, stage, self.results)

    def run_stage(self, name: str, run: Callable[[Stage], object]) -> None:
        """One stage, whatever it does."""
        limit = self._seconds * SHARES[name]
        began = monotonic()
        stage = Stage(began + limit)
        self.results[name] = stage.figures
        watch = threading.Timer(limit + GRACE_S, self._give_up, (name,))
        watch.daemon = True
        watch.start()
        try:
            run(stage)
        except OutOfTime:
            stage.figures["out_of_time"] = True
        except Exception as error:  # one stage that fails must not hide the others
            stage.figures["failed"] = f"{type(error).__name__}: {error}"[:500]
        watch.cancel()
        stage.figures["stage_s"] = round(monotonic() - began, 2)
        print(f"{name}: {json.dumps(stage.figures)}", file=sys.stderr, flush=True)

    def _give_up(self, name: str) -> None:
        """A stage hangs: what there is is written, and the process ends."""
        self.results[name]["failed"] = "it hung"
        print(json.dumps(self._write()), flush=True)
        os._exit(1)

    def _write(self) -> Figures:
        report: Figures = {
            "device": self.results.get("environment", {}).get("device"),
            "emulated": not self.bench.real,
            "note": "" if self.bench.real else NO_GPU,
            "goals": goals(self.results) if self.bench.real else [],
            "stages": self.results,
        }
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(report, indent=2) + "\n")
        return report


def goals(results: Figures) -> list[Figures]:
    """Each goal: what was found, what is wanted, whether it is met; None where it was not measured."""

    def at(*path: str) -> Any:
        here: Any = results
        for name in path:
            here = here.get(name) if isinstance(here, dict) else None
        return here

    curve = {each["rows"]: each for each in at("decode", "batches") or []}
    found: list[tuple[str, float | None, float, bool]] = [
        ("decode attention over the read ceiling", at("attention", "cupy_cuda", "share"), 0.85, True),
        ("swap out over the pinned ceiling", at("swap", "out", "share"), 0.9, True),
        ("swap in over the pinned ceiling", at("swap", "in", "share"), 0.9, True),
        ("decode slower beside swap out", at("swap", "decode_beside_out", "slower"), 0.05, False),
        ("decode slower beside swap in", at("swap", "decode_beside_in", "slower"), 0.05, False),
    ]
    for rows in (1, 8, 32):
        share = curve[rows]["share_of_floor"] if rows in curve else None
        found.append((f"decode at batch {rows} over its floor", share, 0.75, True))
    found.append(
        ("decode at batch 256 over its floor", curve[256]["share_of_floor"] if 256 in curve else None, 0.65, True)
    )
    gain = curve[32]["tokens_per_s"] / curve[1]["tokens_per_s"] if {1, 32} <= set(curve) else None
    found.append(("tokens/s at batch 32 over batch 1", gain, 20.0, True))
    return [
        {
            "goal": name,
            "found": value,
            "wanted": wanted,
            "met": None if value is None else (value >= wanted if at_least else value <= wanted),
        }
        for name, value, wanted, at_least in found
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs the check; status 1 if a stage failed or a backend computes wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--tiny", action="store_true", help="on the CPU, emulated, at tiny sizes, even if there is a GPU"
    )
    parser.add_argument("--seconds", type=float, default=280.0, help="for all stages together")
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu_check.json"))
    asked = parser.parse_args(arguments)
    logs.configure("gpu-check")
    bench = Bench(tiny=asked.tiny)
    threads = torch.get_num_threads()
    if not bench.real:
        torch.set_num_threads(1)  # to wake a second one costs more than what there is to do
    report = Check(bench, asked.seconds, asked.out).run()
    torch.set_num_threads(threads)
    print(json.dumps(report))
    stages: dict[str, Figures] = report["stages"]
    failed = any("failed" in figures for figures in stages.values())
    return int(failed or not stages["correctness"].get("right", False))


if __name__ == "__main__":
    sys.exit(main())
