"""The build that decides: two builds with the same id decide alike, and replay refuses any other.

Read off the sources once, when this module is loaded; a constant from then on.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np

import jitney

_SHARED = (
    "columns.py",
    "decision.py",
    "features.py",
    "scheduler_codec.py",
    "snapshot.py",
    "snapshot_checks.py",
    "wire_parts.py",
)


def _build_id() -> str:
    """Version of the package, and 12 hex digits over numpy's version and every source that a decision passes."""
    here, shared = Path(__file__).parent, Path(str(jitney.__file__)).parent
    sources = {source.relative_to(here.parent).as_posix(): source for source in here.rglob("*.py")}
    sources |= {f"jitney/{name}": shared / name for name in _SHARED}
    digest = hashlib.sha256(np.__version__.encode())
    for name in sorted(sources):
        digest.update(name.encode())
        digest.update(sources[name].read_bytes())
    try:
        version = metadata.version("jitney")
    except metadata.PackageNotFoundError:
        version = "source"
    return f"{version}+{digest.hexdigest()[:12]}"


BUILD: Final = _build_id()
