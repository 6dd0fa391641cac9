"""The golden logs are decided today as they were, on any CPU. If they should not be: see make.py."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitney.log_segments import LogReader
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.replay import replay
from tests.golden.make import FOLDER, STEPS, cases

ROOT = Path(__file__).parents[2]
ALL_OF_THEM = """
import sys
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from scheduler_svc.replay import main
assert not [name for name in __cpu_dispatch__ if __cpu_features__[name]], "a CPU feature is on"
sys.exit(max(main(["--any-build", path]) for path in sys.argv[1:]))
"""


def dispatched() -> list[str]:
    """What numpy would use of this CPU beyond its baseline."""
    core = importlib.import_module("numpy._core._multiarray_umath")
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__[name]]


@pytest.mark.parametrize("name", cases())
def test_every_decision_is_what_it_was(name: str) -> None:
    with LogReader(FOLDER / f"{name}.jlog") as log:
        result = replay(log, BUILT_IN, any_build=True)
    assert result.first_different == ""
    assert (result.equal, result.gaps, result.damaged, result.torn) == (STEPS, 0, 0, 0)


@pytest.mark.skipif(not dispatched(), reason="this CPU has nothing to switch off")
def test_every_decision_is_what_it_was_with_the_cpus_features_switched_off() -> None:
    env = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(dispatched()), "PYTHONPATH": str(ROOT)}
    logs = [str(FOLDER / f"{name}.jlog") for name in cases()]
    done = subprocess.run(
        [sys.executable, "-c", ALL_OF_THEM, *logs], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
