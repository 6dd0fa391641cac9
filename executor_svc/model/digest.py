"""The version of a model: sha256 over the files that decide what it says, and a memo of digests already taken.

The memo spares a second start the reading of every byte. An entry counts only while device, inode, size, time of
change and time of modification of the file are those that it was taken at.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from executor_svc.model.atomic_file import write_atomically
from executor_svc.model.config import BadModel

_MEMO_VERSION = 1


def file_digest(path: Path, cache_dir: Path | None) -> str:
    """sha256 of the file in hex, from the memo under `cache_dir` if the file is unchanged."""
    try:
        stat = path.stat()
        identity = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, _MEMO_VERSION]
        memo = _memo_path(path, cache_dir)
        known = _recall(memo, identity)
        if known:
            return known
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise BadModel(f"{path} is missing", field=path.name) from None
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror}", field=path.name) from None
    if memo is not None:
        content = json.dumps({"identity": identity, "digest": digest}).encode()
        write_atomically(memo, lambda temporary: temporary.write_bytes(content))
    return digest


def combined_digest(directory: Path, names: Sequence[str], cache_dir: Path | None) -> str:
    """One digest over several files of a directory and their names, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(names):
        total.update(f"{name}\0{file_digest(directory / name, cache_dir)}\0".encode())
    return total.hexdigest()


def _memo_path(path: Path, cache_dir: Path | None) -> Path | None:
    if cache_dir is None:
        return None
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return cache_dir / "digests" / f"{name}.json"


def _recall(memo: Path | None, identity: list[int]) -> str:
    if memo is None:
        return ""
    try:
        entry = json.loads(memo.read_bytes())
        return str(entry["digest"]) if entry["identity"] == identity else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
