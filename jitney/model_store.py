"""What fetching models is made of: progress, one process at a time in a folder, files that appear whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all); now and then, from the calling thread."""


def silent(what: str, done: int, total: int) -> None:
    """Tells nobody."""


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below; a file that goes away meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def write_json(path: Path, content: object) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content))
    part.replace(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; leftovers of one that was killed are removed."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob(".fetch-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
