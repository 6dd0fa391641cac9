"""The build that decides: two builds with the same id decide alike, and replay refuses any other."""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata
from pathlib import Path

import numpy as np

import jitney.columns
import jitney.decision
import jitney.scheduler_codec
import jitney.snapshot
import jitney.snapshot_checks

_SHARED = (jitney.columns, jitney.decision, jitney.scheduler_codec, jitney.snapshot, jitney.snapshot_checks)


@functools.cache
def build_id() -> str:
    """Version of the package, and 12 hex digits over every source that a decision passes through and numpy's version.

    Reads the sources once.
    """
    here = Path(__file__).parent
    sources = {source.relative_to(here).as_posix(): source for source in here.rglob("*.py")}
    sources |= {module.__name__: Path(str(module.__file__)) for module in _SHARED}
    digest = hashlib.sha256(np.__version__.encode())
    for name in sorted(sources):
        digest.update(name.encode())
        digest.update(sources[name].read_bytes())
    try:
        version = metadata.version("jitney")
    except metadata.PackageNotFoundError:
        version = "source"
    return f"{version}+{digest.hexdigest()[:12]}"
