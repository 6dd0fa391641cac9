"""What can happen to the SSD's files, done to real ones: nothing is lost but the hit, and it heals."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_svc.backoff import LAST_S
from cache_svc.disk_layout import DiskLayout
from cache_svc.mover import Outcome
from tests.support.tier_bytes import FailingDisk, TierRig, disk_usage, entry, payload

OK, BAD, FAILED, DROPPED = Outcome.OK, Outcome.BAD, Outcome.FAILED, Outcome.DROPPED


def flip(path: Path, at: int) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def swap_slots(path: Path, layout: DiskLayout) -> None:
    """The bytes of slots 0 and 1, headers left where they are."""
    data = bytearray(path.read_bytes())
    size, header = layout.slot_bytes, layout.header_bytes
    data[header:size], data[size + header : 2 * size] = data[size + header : 2 * size], data[header:size]
    path.write_bytes(data)


def make_directory(path: Path, layout: DiskLayout) -> None:
    """Where the file was."""
    path.unlink()
    path.mkdir()


def make_link(path: Path, layout: DiskLayout) -> None:
    """To the file, which is elsewhere now."""
    aside = path.with_suffix(".aside")
    path.rename(aside)
    path.symlink_to(aside)


def write_anything(path: Path, layout: DiskLayout) -> None:
    """As many bytes as before."""
    path.write_bytes(os.urandom(path.stat().st_size))


DAMAGE: dict[str, Callable[[Path, DiskLayout], None]] = {
    "emptied": lambda path, layout: os.truncate(path, 0),
    "cut in half": lambda path, layout: os.truncate(path, layout.slot_bytes // 2),
    "a bit of the block flipped": lambda path, layout: flip(path, layout.header_bytes + 100),
    "a bit of the header flipped": lambda path, layout: flip(path, 60),
    "blocks swapped": swap_slots,
    "removed": lambda path, layout: path.unlink(),
    "another file": write_anything,
    "a directory": make_directory,
    "a link": make_link,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_while_it_runs(tmp_path: Path, what: str) -> None:
    with TierRig(tmp_path) as rig:
        assert rig.disk.layout is not None
        rig.store(0, 1, 20)
        DAMAGE[what](rig.files()[0], rig.disk.layout)
        assert rig.load(0) in (BAD, FAILED)
        assert rig.load(20) is OK  # in another file
        assert rig.store(25) == [OK]
        if what != "a directory":
            assert rig.store(1) == [OK]
            assert rig.load(1) is OK


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_while_it_is_down(tmp_path: Path, what: str) -> None:
    with TierRig(tmp_path) as rig:
        rig.store(0, 1, 20)
        layout = rig.disk.layout
        assert layout is not None
        path = rig.files()[0]
    DAMAGE[what](path, layout)
    with TierRig(tmp_path) as rig:
        assert rig.found[20] == entry(20)
        assert rig.load(0) in (BAD, FAILED)
        assert rig.load(20) is OK
        assert rig.store(25) == [OK]


def test_a_block_of_another_model_is_not_taken_for_ours(tmp_path: Path) -> None:
    with TierRig(tmp_path) as rig:
        rig.store(3)
        job = rig.read(3, 3)
        for change in ({"fingerprint": b"other"}, {"checksum": 1}, {"key": entry(4).key}, {"parent": entry(4).key}):
            assert rig.do(dataclasses.replace(job, entry=dataclasses.replace(job.entry, **change))) == [BAD]
        assert rig.do(dataclasses.replace(job, entry=dataclasses.replace(job.entry, place=True))) == [OK]
        assert rig.mover.status().outcomes[BAD] == 4


def test_a_removed_file_comes_back_empty(tmp_path: Path) -> None:
    with TierRig(tmp_path) as rig:
        rig.store(0, 1)
        rig.files()[0].unlink()
        assert rig.load(0) is BAD
        assert rig.store(1) == [OK]
        assert rig.load(1) is OK
        assert len(rig.files()) == 3
        assert disk_usage(rig.directory) <= 1 << 20


def test_a_removed_directory_comes_back_empty_and_is_locked_again(tmp_path: Path) -> None:
    with TierRig(tmp_path) as rig:
        rig.store(0, 20)
        shutil.rmtree(rig.directory)
        assert [rig.load(0), rig.load(20)] == [BAD, BAD]
        assert rig.store(0, 20) == [OK, OK]
        assert [rig.load(0), rig.load(20)] == [OK, OK]
        assert (rig.directory / "lock").read_text() == str(os.getpid())
    with TierRig(tmp_path) as rig:
        assert sorted(rig.found) == [0, 20]


@pytest.mark.parametrize("name", ["ENOSPC", "EROFS", "EIO"])
def test_a_disk_that_cannot_be_written_is_left_alone_until_it_heals(tmp_path: Path, name: str) -> None:
    disk = FailingDisk()
    with TierRig(tmp_path, calls=disk) as rig:
        rig.store(1)
        disk.fails = {"write": getattr(errno, name)}
        assert rig.store(2) == [FAILED]
        calls = len(disk.calls)
        assert rig.store(3, 4) == [DROPPED] * 2
        assert len(disk.calls) == calls
        assert rig.load(1) is OK
        assert rig.load(2) is BAD
        rig.clock_s += LAST_S
        assert rig.store(5) == [FAILED]
        disk.fails = {}
        rig.clock_s += 2 * LAST_S
        assert rig.store(2) == [OK]
        assert rig.load(2) is OK
        status = rig.mover.status()
        assert status.errors == {name: 2}
        assert (status.outcomes[FAILED], status.outcomes[DROPPED], status.outcomes[BAD]) == (2, 2, 1)


def test_a_disk_that_cannot_be_read_is_a_miss_until_it_heals(tmp_path: Path) -> None:
    disk = FailingDisk()
    with TierRig(tmp_path, calls=disk) as rig:
        rig.store(1, 2)
        disk.fails = {"read": errno.EIO}
        assert [rig.load(1), rig.load(2)] == [FAILED, FAILED]
        disk.fails = {}
        assert [rig.load(1), rig.load(2)] == [OK, OK]
        assert rig.mover.status().errors == {"EIO": 2}


def test_files_that_cannot_be_opened_are_tried_again_later(tmp_path: Path) -> None:
    with TierRig(tmp_path) as rig:
        rig.store(1)
    disk = FailingDisk()
    disk.fails = {"open": errno.EMFILE}
    with TierRig(tmp_path, calls=disk) as rig:
        assert rig.slots > 40
        assert not rig.found
        assert rig.load(1) is FAILED
        assert rig.store(2) == [FAILED]
        disk.fails = {}
        rig.clock_s += 2 * LAST_S
        assert rig.load(1) is OK
        assert rig.store(2) == [OK]


def test_files_that_this_user_may_not_open_are_replaced(tmp_path: Path) -> None:
    class Forbidden(FailingDisk):
        """Permissions do not stop every user, so that the refusal is this class's own."""

        def open(self, path: Path, *, direct: bool) -> int:
            if path.exists() and not path.stat().st_mode & 0o400:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return super().open(path, direct=direct)

    with TierRig(tmp_path) as rig:
        rig.store(1, 20)
        rig.files()[0].chmod(0)
    with TierRig(tmp_path, calls=Forbidden()) as rig:
        assert sorted(rig.found) == [20]
        assert rig.load(1) is BAD
        assert rig.store(1) == [OK]
        assert rig.load(1) is OK


def test_a_directory_that_cannot_be_locked_at_the_start_is_no_ssd_for_now(tmp_path: Path) -> None:
    lock = tmp_path / "ssd" / "lock"
    lock.mkdir(mode=0o700, parents=True)
    with TierRig(tmp_path) as rig:
        assert rig.slots > 40
        assert rig.store(1) == [FAILED]
        lock.rmdir()
        rig.clock_s += 2 * LAST_S
        assert rig.store(1) == [OK]
        assert rig.load(1) is OK


def test_slow_reads_come_in_the_end(tmp_path: Path) -> None:
    disk = FailingDisk()
    with TierRig(tmp_path, calls=disk) as rig:
        rig.store(1, 2, 20)
        disk.delay_s = 0.1
        assert rig.do(*(rig.read(number, number, number % 8) for number in (1, 2, 20))) == [OK] * 3
        assert bytes(rig.memory.view(4)[: len(payload(20))]) == payload(20)
