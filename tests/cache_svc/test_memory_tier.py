"""The CPU tier's shared memory: what executors map."""

from __future__ import annotations

import mmap
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cache_svc.memory_tier import MemoryTier
from cache_svc.pages import PAGE_BYTES
from jitney.errors import Conflict
from tests.support.processes import wait_until

HOLD = """
import sys, time
from pathlib import Path
from cache_svc.memory_tier import MemoryTier
tier = MemoryTier(Path(sys.argv[1]), sys.argv[2], 1 << 20)
tier.allocate()
tier.lay_out(4096)
print("there", flush=True)
time.sleep(1000)
"""


def test_slots_are_pages_of_segments_that_others_can_map(tmp_path: Path) -> None:
    tier = MemoryTier(tmp_path, "a", 5 * PAGE_BYTES * 4, segment_bytes=2 * PAGE_BYTES * 4)
    tier.allocate()
    tier.lay_out(PAGE_BYTES + 1)
    assert tier.slot_bytes == 2 * PAGE_BYTES
    assert [segment.slots for segment in tier.segments] == [3, 3, 1]
    assert tier.slots == 7
    for slot in range(tier.slots):
        tier.view(slot)[:] = bytes([slot + 1]) * tier.slot_bytes
        tier.set_generation(slot, 100 + slot)
    seen, generations = [], []
    for segment in tier.segments:
        assert segment.bytes == Path(segment.path).stat().st_size
        with open(segment.path, "r+b") as file, mmap.mmap(file.fileno(), segment.bytes) as room:
            slots = np.frombuffer(room, np.uint8, segment.slots * segment.slot_bytes)
            seen += slots.reshape(segment.slots, -1)[:, -1].tolist()
            table = np.frombuffer(room, "<u4", segment.slots, segment.slots * segment.slot_bytes)
            generations += table.tolist()
            del slots, table
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    assert generations == [100, 101, 102, 103, 104, 105, 106]
    tier.close()


def test_files_are_private_and_have_all_their_room(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    tier = MemoryTier(shared, "a", 1 << 20)
    tier.allocate()
    tier.lay_out(PAGE_BYTES)
    (segment,) = tier.segments
    path = Path(segment.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(shared.stat().st_mode) == 0o700
    assert path.stat().st_blocks * 512 >= 1 << 20
    assert tier.bytes == 1 << 20
    tier.close()
    assert not path.parent.exists()


@pytest.mark.parametrize(("limit_bytes", "slots"), [(0, 0), (4095, 0), (2 * PAGE_BYTES, 1)])
def test_no_tier_and_a_tier_of_one_slot(tmp_path: Path, limit_bytes: int, slots: int) -> None:
    tier = MemoryTier(tmp_path, "a", limit_bytes)
    tier.allocate()
    tier.lay_out(PAGE_BYTES)
    assert (tier.slots, len(tier.segments)) == (slots, min(slots, 1))
    tier.close()


def test_staging_slots_are_there_whatever_the_limit(tmp_path: Path) -> None:
    for limit_bytes in (0, 2 * PAGE_BYTES):
        tier = MemoryTier(tmp_path, f"limit-{limit_bytes}", limit_bytes)
        tier.allocate()
        tier.lay_out(PAGE_BYTES, least_slots=5)
        assert tier.slots >= 5
        tier.view(4)[:] = bytes(PAGE_BYTES)
        tier.close()


def test_full_shared_memory_is_a_smaller_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate
    given = 0

    def allocate(file: int, start: int, size: int) -> None:
        nonlocal given
        if given + size > 6 * PAGE_BYTES:
            raise OSError(28, "No space left on device")
        given += size
        real(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    tier = MemoryTier(tmp_path, "a", 20 * PAGE_BYTES, segment_bytes=3 * PAGE_BYTES)
    tier.allocate()
    tier.lay_out(PAGE_BYTES)
    assert tier.bytes == 6 * PAGE_BYTES
    assert tier.slots == 4
    assert sorted(path.name for path in (tmp_path / "cache-a").iterdir()) == ["lock", "segment-0", "segment-1"]
    tier.close()


def test_what_a_killed_cache_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), name], stdout=subprocess.PIPE)
        for name in ("lives", "dies")
    ]
    try:
        for process in processes:
            assert process.stdout is not None and b"there\n" in process.stdout
        processes[1].send_signal(signal.SIGKILL)
        processes[1].wait()
        assert (tmp_path / "cache-dies" / "segment-0").exists()
        (tmp_path / "cache-unfinished").mkdir()
        tier = MemoryTier(tmp_path, "next", 1 << 20)
        assert sorted(path.name for path in tmp_path.glob("cache-*")) == ["cache-lives", "cache-next"]
        assert (tmp_path / "cache-lives" / "segment-0").exists()
        tier.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    wait_until(lambda: not (tmp_path / "cache-next").exists())


def test_a_shared_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link", "file/below"):
        with pytest.raises(Conflict) as caught:
            MemoryTier(tmp_path / name, "a", 1 << 20)
        assert caught.value.field == "shared_dir"
