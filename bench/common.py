"""What several benches need: how loaded the machine is, and processes that keep its cores busy."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np


def load_average() -> str:
    """Load of the last minute and cores, for the head of a table: figures of a machine in use are not clean."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between neighbours; 0 of no values."""
    return float(np.percentile(values, percent)) if len(values) else 0.0


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """A spinning process on every core."""
    spin = [sys.executable, "-c", "import os\nwhile os.getppid() != 1: sum(range(100_000))"]
    processes = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
