"""The directory of a cache process below the shared one: its own as long as it lives, found and removed by the next.

`<shared>/cache-<name>/lock` is locked (flock) while the process lives. A starting cache removes the directories whose
lock is free: a cache that was killed leaves its segments behind. `<shared>/sweep.lock` is held while a directory is
made or removed, so that none is seen between its creation and its lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jitney.errors import Conflict
from jitney.serving import logs

PREFIX = "cache-"
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


def own_directory(path: Path, field: str) -> None:
    """Makes the directory, for this user alone. Conflict if something else is there, or somebody else owns it."""
    try:
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise Conflict(f"{path} cannot be made: {error.strerror}", field=field, value=path) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise Conflict(
            f"{path} is no directory of user {os.geteuid()}", field=field, limit=os.geteuid(), value=found.st_uid
        )


def locked(path: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the file's lock; None if another process holds it and `wait` is false. OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except BaseException:
        os.close(file)
        raise
    return file


class SharedArea:
    """A fresh directory of this process's own. Conflict if the shared directory cannot be used."""

    def __init__(self, shared: Path, name: str) -> None:
        own_directory(shared, "shared_dir")
        self._shared = shared
        self.path = shared / (PREFIX + name)
        try:
            with self._sweeping():
                _sweep(shared)
                self.path.mkdir(mode=DIRECTORY_MODE)
                lock = locked(self.path / "lock", wait=False)
        except OSError as error:
            what = f"{self.path} cannot be made: {error.strerror}"
            raise Conflict(what, field="shared_dir", value=shared) from error
        assert lock is not None  # nobody else comes between: the directory is new and the sweep is locked
        self._lock = lock

    def close(self) -> None:
        """Removes the directory. What others have mapped stays theirs until they unmap it."""
        with self._sweeping():
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)

    @contextmanager
    def _sweeping(self) -> Iterator[None]:
        sweep = locked(self._shared / "sweep.lock", wait=True)
        assert sweep is not None
        try:
            yield
        finally:
            os.close(sweep)


def _sweep(shared: Path) -> None:
    """Removes the directories of caches that are gone."""
    for folder in shared.glob(PREFIX + "*"):
        try:
            lock = locked(folder / "lock", wait=False)
        except OSError:
            continue  # not ours, or being removed
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            logs.get("memory_tier").info("removed what a cache left behind", directory=str(folder))
