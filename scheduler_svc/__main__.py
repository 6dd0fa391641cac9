"""`python -m scheduler_svc`: one scheduler replica."""

from __future__ import annotations

import sys

from jitney.serving.config import load_or_exit
from jitney.serving.server import run, serve_until_signal
from scheduler_svc.config import SERVICE, SchedulerConfig
from scheduler_svc.server import scheduler_server


async def main(config: SchedulerConfig) -> int:
    """Serves until a signal."""
    return await serve_until_signal(scheduler_server(config))


if __name__ == "__main__":
    sys.exit(run(main(load_or_exit(SchedulerConfig, SERVICE))))
