"""The file by which the cache knows whether this process lives: locked from start to end, by the kernel."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from jitney.errors import Conflict, InvalidRequest


class LockFile:
    """Created and locked; `close` removes it. Conflict if another process has it, InvalidRequest if it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidRequest(f"--shared-dir: {path} cannot be made: {error}", field="shared_dir") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise Conflict(f"{path} is locked by another process", field="shared_dir", value=path) from None

    def close(self) -> None:
        """Lets it go."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
