"""The check of the GPU backends runs in full where there is no GPU, and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.gpu_check import SHARES, Check, goals
from bench.gpu_common import Bench, Stage

ROOT = Path(__file__).parents[2]


def test_it_runs_in_full_against_the_emulation(tmp_path: Path) -> None:
    out = tmp_path / "results" / "gpu_check.json"
    command = [sys.executable, "-m", "bench.gpu_check", "--tiny", "--seconds", "3000", f"--out={out}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert report["device"] is None and report["emulated"] and "no figure here is a GPU's" in report["note"]
    assert report["goals"] == []
    stages = report["stages"]
    assert list(stages) == list(SHARES)
    assert not any({"failed", "out_of_time"} & set(figures) for figures in stages.values())
    assert stages["environment"]["cupy_cuda_in_graph"] and stages["environment"]["torch_cuda_in_graph"]
    assert stages["correctness"]["right"]
    assert stages["decode"]["backend"] == "cupy_cuda"
    assert all(each["tokens_per_s"] > 0 for each in stages["decode"]["batches"])
    assert stages["decode"]["transformers"]["tokens_per_s_at_1"] > 0
    assert stages["swap"]["out"]["bytes_per_s"] > 0 and stages["swap"]["decode_beside_in"]["bytes_per_s"] > 0


def test_goals_are_judged_by_what_was_measured() -> None:
    curve = [
        {"rows": 1, "tokens_per_s": 220.0, "share_of_floor": 0.8},
        {"rows": 32, "tokens_per_s": 4000.0, "share_of_floor": 0.7},
    ]
    found = goals(
        {
            "attention": {"cupy_cuda": {"share": 0.9}},
            "swap": {"decode_beside_out": {"slower": 0.04}, "decode_beside_in": {"slower": 0.06}},
            "decode": {"batches": curve},
        }
    )
    met = {each["goal"]: each["met"] for each in found}
    assert met == {
        "decode attention over the read ceiling": True,
        "swap out over the pinned ceiling": None,
        "swap in over the pinned ceiling": None,
        "decode slower beside swap out": True,
        "decode slower beside swap in": False,
        "decode at batch 1 over its floor": True,
        "decode at batch 8 over its floor": None,
        "decode at batch 32 over its floor": False,
        "decode at batch 256 over its floor": None,
        "tokens/s at batch 32 over batch 1": False,
    }


def test_a_stage_that_fails_or_runs_late_does_not_hide_the_others(tmp_path: Path) -> None:
    check = Check(Bench(tiny=True), 1000.0, tmp_path / "out.json")

    def late(stage: Stage) -> None:
        stage.figures["so_far"] = 1
        stage.check(needs_s=1e6)

    def wrong(stage: Stage) -> None:
        raise RuntimeError("no such kernel")

    check.run_stage("decode", late)
    check.run_stage("swap", wrong)
    assert check.results["decode"]["so_far"] == 1 and check.results["decode"]["out_of_time"]
    assert check.results["swap"]["failed"] == "RuntimeError: no such kernel"
