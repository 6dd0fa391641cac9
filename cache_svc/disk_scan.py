"""The headers of an earlier cache, read by a thread while the cache works already."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cache_svc.disk_jobs import DiskEntry
from cache_svc.disk_tier import DiskTier
from jitney.serving import logs

AT_ONCE = 256

Found = Sequence[tuple[int, DiskEntry]]


class DiskScan:
    """`found` is called by the thread with the next entries; none at all: that was the end of the scan."""

    def __init__(self, disk: DiskTier, found: Callable[[Found], None]) -> None:
        self._disk = disk
        self._found = found
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scan", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finds nothing any more, from when this returns. Blocks."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        entries: list[tuple[int, DiskEntry]] = []
        count = 0
        try:
            for found in self._disk.scan(self._stopped.is_set):
                entries.append(found)
                if len(entries) >= AT_ONCE:
                    count += len(entries)
                    self._found(entries)
                    entries = []
        except Exception:
            logs.get("disk_tier").exception("the scan failed")
        if not self._stopped.is_set():
            count += len(entries)
            logs.get("disk_tier").info("scanned", blocks=count)
            if entries:
                self._found(entries)
            self._found(())
