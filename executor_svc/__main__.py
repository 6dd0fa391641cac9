"""`python -m executor_svc`: starts an executor. `--help` lists the settings."""

from __future__ import annotations

import sys

from executor_svc.config import SERVICE, ExecutorConfig
from executor_svc.service import serve
from jitney.serving.config import load_or_exit
from jitney.serving.server import run

if __name__ == "__main__":
    sys.exit(run(serve(load_or_exit(ExecutorConfig, SERVICE))))
