"""The whole demo around a tiny model: three processes, thirty requests, one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.tiny_llama import make_tiny_llama


def run_demo(model: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """As `make demo` does, with its folder below `tmp_path`."""
    command = [sys.executable, "-m", "jitney.demo", "--model", str(model)]
    pinned = {"JITNEY_EXECUTOR_THREADS": "2", "JITNEY_EXECUTOR_MAX_STEP_TOKENS": "256"}
    environment = pinned | {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": "."}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_the_demo_runs_to_its_last_line(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model", context=8192)
    done = run_demo(model, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    found = json.loads(lines[-1])
    assert (found["requests"], found["completed"], found["cancelled"]) == (30, 29, 1)
    assert list(found) == [
        "requests", "completed", "cancelled", "output_tokens", "tokens_per_s", "ttft_ms_p50", "tpot_ms_p50",
        "prefix_hit_tokens", "mean_batch",
    ]  # fmt: skip
    assert found["output_tokens"] > 29 and found["mean_batch"] > 1
    assert found["prefix_hit_tokens"] > 7 * 200, "the eight desk requests share their system prompt"
    assert "Rows in a step, over time:" in done.stdout
    assert not list(tmp_path.glob("jitney-demo-*")), "a whole run leaves nothing behind"


def test_a_demo_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    done = run_demo(tmp_path / "no-such-model", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("jitney demo: executor ended with status")
    assert done.stderr.count("\n") == 1
