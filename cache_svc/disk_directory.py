"""The directory of the SSD tier: this process's alone, and never fuller than its limit, from the start on.

A lock (flock) on `lock` keeps a second cache out. What an earlier cache left is found by the names of its files: what
does not fit any more is cut off or removed before anything is served; what is of another version goes.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cache_svc.disk_layout import DiskLayout, parsed
from cache_svc.shared_area import locked, own_directory
from jitney.errors import Conflict
from jitney.serving import logs


class DiskDirectory:
    """Conflict if another cache has it, or if something else stands there. A directory that cannot be used now may be
    later: see `ensure`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._ensuring = threading.Lock()
        self._log = logs.get("disk_tier")
        if (other := _in_the_way(path)) is not None:
            what = f"--ssd-dir must be a folder, {other} is not one"
            raise Conflict(what, field="ssd_dir", value=path)
        try:
            self.ensure()
        except BlockingIOError as error:
            owner = _owner(path)
            message = f"{path} is in use by another cache (process {owner}): give each its own --ssd-dir"
            raise Conflict(message, field="ssd_dir", value=path) from error
        except OSError as error:
            self._log.warning("the SSD cannot be used now", directory=str(path), error=str(error))

    def ensure(self) -> None:
        """The directory is there and locked by this process, as far as that can be had. OSError if not, of these
        BlockingIOError if another cache has it."""
        with self._ensuring:
            if self._lock is not None:
                with suppress(OSError):
                    if os.path.samestat(os.stat(self.path / "lock"), os.fstat(self._lock)):
                        return
                os.close(self._lock)
                self._lock = None
            try:
                own_directory(self.path, "ssd_dir")
            except Conflict as error:
                cause = error.__cause__
                code = cause.errno if isinstance(cause, OSError) and cause.errno else errno.EACCES
                raise OSError(code, error.message) from error
            lock = locked(self.path / "lock", wait=False)
            if lock is None:
                raise BlockingIOError(errno.EWOULDBLOCK, "another cache has it", str(self.path))
            self._lock = lock
            with suppress(OSError):
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)

    def tidy(self, limit_bytes: int) -> DiskLayout | None:
        """Cuts what was left down to the limit; returns its layout, with the slots that it may have now."""
        found = [(name, *known) for name in self._names() if (known := parsed(name)) is not None]
        layouts = Counter(layout for _, layout, _ in found)
        kept = None if not layouts else max(layouts, key=lambda each: layouts[each]).fitting(limit_bytes)
        for name, layout, number in found:
            size = kept.file_bytes(number) if kept is not None and kept.same_slots(layout) else 0
            self._cut(self.path / name, size)
        for name in self._names():
            if name.endswith(".kv") and parsed(name) is None:
                self._cut(self.path / name, 0)
            elif not name.endswith(".kv") and name != "lock":
                self._log.warning("a file of somebody else is in the SSD's directory", name=name)
        return kept

    def drop(self, layout: DiskLayout) -> None:
        """Removes the files of a layout."""
        for name in self._names():
            known = parsed(name)
            if known is not None and known[0] == replace(layout, slots=0):
                self._cut(self.path / name, 0)

    def close(self) -> None:
        """Lets another cache have the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path)) if self._lock is not None else []
        except OSError:
            return []

    def _cut(self, path: Path, size: int) -> None:
        """The file has at most `size` bytes then; removed if these are none, or if it cannot be cut."""
        try:
            if size and path.lstat().st_size <= size:
                return
            if size:
                os.truncate(path, size)
                return
        except OSError as error:
            self._log.warning("a file of the SSD cannot be cut: removed", path=str(path), error=str(error))
        try:
            path.unlink()
        except OSError as error:
            self._log.error("a file of the SSD cannot be removed", path=str(path), error=str(error))


def _in_the_way(path: Path) -> Path | None:
    """What is no directory (a link neither, for the last part of the path), so that none can be made there."""
    for each in (path, *path.parents):
        try:
            mode = (each.lstat() if each is path else each.stat()).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
        return None if stat.S_ISDIR(mode) else each
    return None


def _owner(path: Path) -> str:
    try:
        return (path / "lock").read_text(encoding="ascii").strip() or "?"
    except (OSError, UnicodeDecodeError):
        return "?"
