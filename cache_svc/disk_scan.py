"""The headers of an earlier cache, read by a thread while the cache works already."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cache_svc.disk_jobs import DiskEntry
from cache_svc.disk_tier import DiskTier
from jitney.serving import logs

AT_ONCE = 256
PROBED_BYTES = 16 << 20
"""So much is read, blocks and all, to know how fast the disk is before anybody asks for what is on it."""

Found = Sequence[tuple[int, DiskEntry]]


class DiskScan:
    """`found` is called by the thread with the next entries; none at all: that was the end of the scan. Then
    `read_bytes_per_s` is known, if there was something to read."""

    def __init__(self, disk: DiskTier, found: Callable[[Found], None]) -> None:
        self.read_bytes_per_s = 0
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
        try:
            probed = self._scan()
            if probed:
                self.read_bytes_per_s = self._disk.read_rate(probed)
        except Exception:
            logs.get("disk_tier").exception("the scan failed")
        if not self._stopped.is_set():
            self._found(())

    def _scan(self) -> list[int]:
        """Tells of all that there is; returns some slots to try the disk with."""
        entries: list[tuple[int, DiskEntry]] = []
        probed: list[int] = []
        count = 0
        slot_bytes = 0 if self._disk.layout is None else self._disk.layout.slot_bytes
        for slot, entry in self._disk.scan(self._stopped.is_set):
            count += 1
            entries.append((slot, entry))
            if (len(probed) + 1) * slot_bytes <= PROBED_BYTES:
                probed.append(slot)
            if len(entries) >= AT_ONCE:
                self._found(entries)
                entries = []
        if self._stopped.is_set():
            return []
        if entries:
            self._found(entries)
        logs.get("disk_tier").info("scanned", blocks=count)
        return probed
