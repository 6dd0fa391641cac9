"""`python -m tests.support.failing_cache SWITCH ...`: a cache with the FailingDisk of that switch."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

from cache_svc.config import CacheConfig
from cache_svc.server import serve
from jitney.serving.config import load_or_exit
from jitney.serving.server import run
from tests.support.tier_bytes import FailingDisk

if __name__ == "__main__":
    switch = Path(sys.argv[1])
    config = load_or_exit(CacheConfig, "cache", sys.argv[2:])
    sys.exit(run(serve(config, uuid.uuid4().bytes, FailingDisk(switch))))
