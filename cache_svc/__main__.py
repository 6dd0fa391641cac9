"""`python -m cache_svc`: starts the cache. `--help` lists the settings."""

from __future__ import annotations

import sys
import uuid

from cache_svc.config import CacheConfig
from cache_svc.server import serve
from jitney.serving.config import load_or_exit
from jitney.serving.server import run


def main() -> int:
    """Reads the configuration and serves."""
    return run(serve(load_or_exit(CacheConfig, "cache"), uuid.uuid4().bytes))


if __name__ == "__main__":
    sys.exit(main())
