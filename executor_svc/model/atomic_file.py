"""Writing a file so that no reader, and no crash, ever sees a part of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> bool:
    """Has `write` fill a temporary file beside `path`, syncs it and renames it.

    Files written so are caches: a full or read-only disk is no error. Returns whether the file is there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.fchmod(handle, 0o644)
        os.close(handle)
    except OSError:
        return False
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        return False
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return True
