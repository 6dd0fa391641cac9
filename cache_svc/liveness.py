"""Which executors' processes live: each holds its lock file (flock) from start to end, and the kernel lets it go.

The file is opened when the executor opens the cache, and kept open: that somebody removes it says nothing of the
process. Probing takes the lock shared and gives it back at once.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from cache_svc.pins import Owner
from jitney.errors import InvalidRequest


def held_lock(path: Path) -> int:
    """A descriptor of a lock file that somebody holds. InvalidRequest if it cannot be opened, or nobody holds it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        what = f"the lock file {path} cannot be opened: {error}"
        raise InvalidRequest(what, field="lock_path", value=path) from error
    if _is_free(file):
        os.close(file)
        what = f"nobody holds the lock file {path}"
        raise InvalidRequest(what, field="lock_path", limit="locked by the executor", value=path)
    return file


class LockWatch:
    """Lock files of the owners whose processes may still copy."""

    def __init__(self) -> None:
        self._files: dict[Owner, int] = {}

    def add(self, owner: Owner, lock: int) -> None:
        """Watches a `held_lock` from here on."""
        self._files[owner] = lock

    def take_gone(self) -> list[Owner]:
        """Those whose process is gone, once each."""
        gone = [owner for owner, file in self._files.items() if _is_free(file)]
        for owner in gone:
            os.close(self._files.pop(owner))
        return gone

    def forget(self, owner: Owner) -> None:
        """It need not be watched any more."""
        file = self._files.pop(owner, None)
        if file is not None:
            os.close(file)

    def close(self) -> None:
        """Watches nobody any more."""
        for owner in list(self._files):
            self.forget(owner)


def _is_free(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    return True
