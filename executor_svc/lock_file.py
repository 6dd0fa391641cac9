"""The file by which the cache knows whether this process lives: locked from start to end, by the kernel."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from jitney.errors import Conflict, InvalidRequest

SUFFIX = ".lock"
TRIES = 10
PAUSE_S = 0.01


class LockFile:
    """Created and locked; `close` removes it. Conflict if another process has it, InvalidRequest if it cannot be.

    Files of the same kind (`path`'s name up to the first dash) whose process is gone are removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = self._locked()
        except BlockingIOError:
            raise Conflict(f"{path} is locked by another process", field="shared_dir", value=path) from None
        except OSError as error:
            raise InvalidRequest(f"--shared-dir: {path} cannot be made: {error}", field="shared_dir") from None
        for other in path.parent.glob(path.name.split("-")[0] + "-*" + SUFFIX):
            if other != path:
                _remove_if_free(other)

    def close(self) -> None:
        """Lets it go."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _locked(self) -> int:
        """A descriptor of the file that is there under its name. One that a sweep looks at in this moment is tried
        again, one that it removed is made again."""
        tries = TRIES
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same(fd, self.path):
                    return fd
            except BlockingIOError:
                tries -= 1
                if not tries:
                    os.close(fd)
                    raise
                time.sleep(PAUSE_S)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def _same(fd: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _remove_if_free(path: Path) -> None:
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(fd, path):
                path.unlink()
        finally:
            os.close(fd)
