"""The SSD tier on a real directory: layout, headers, limits, and a warm start."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cache_svc.disk_directory import DiskDirectory
from cache_svc.disk_header import decode_header, encode_header
from cache_svc.disk_layout import DiskLayout, parsed
from cache_svc.disk_tier import DiskTier
from cache_svc.index import Content, Origin
from cache_svc.mover import Outcome
from jitney.errors import Conflict
from tests.support.tier_bytes import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    FailingDisk,
    TierRig,
    disk_usage,
    entry,
    payload,
)

OK = Outcome.OK


@pytest.mark.parametrize("block_bytes", [1, 4096, 65536, 589824, 2 << 20])
@pytest.mark.parametrize("limit_bytes", [0, 100_000, 10 << 20, (3 << 30) + 12345, 1 << 40])
def test_a_layout_never_takes_more_than_its_limit(block_bytes: int, limit_bytes: int) -> None:
    layout = DiskLayout.of_block(block_bytes, 16, 1 << 30).fitting(limit_bytes)
    assert sum(layout.file_bytes(number) for number in range(layout.files)) == layout.slots * layout.slot_bytes
    assert layout.slots * layout.slot_bytes <= max(0, limit_bytes - (64 << 10))
    if limit_bytes > 2 * (layout.slot_bytes + (128 << 10)):
        assert layout.slots * layout.slot_bytes > 0.9 * limit_bytes - layout.slot_bytes - (256 << 10)
    if layout.slots:
        number, offset = layout.place(layout.slots - 1)
        assert number == layout.files - 1
        assert offset + layout.slot_bytes == layout.file_bytes(number)
        assert parsed(layout.name(number)) == (dataclasses.replace(layout, slots=0), number)
    assert parsed("v2-4096-1-1-00000.kv") is None
    assert parsed("else") is None


def test_a_header_says_all_and_any_changed_bit_makes_it_void() -> None:
    said = encode_header(entry(7), 4096, BLOCK_BYTES)
    assert said is not None
    header = bytearray(said.ljust(4096, b"\0"))
    assert decode_header(memoryview(header), BLOCK_BYTES) == entry(7)
    assert decode_header(memoryview(header), BLOCK_BYTES + 1) is None
    assert decode_header(memoryview(header)[:-1], BLOCK_BYTES) is None
    assert decode_header(memoryview(bytearray(4096)), BLOCK_BYTES) is None
    for bit in range(8 * len(said)):
        header[bit // 8] ^= 1 << bit % 8
        assert decode_header(memoryview(header), BLOCK_BYTES) is None
        header[bit // 8] ^= 1 << bit % 8


def test_a_header_whose_key_is_not_that_of_its_tokens_is_none() -> None:
    said = encode_header(dataclasses.replace(entry(7), key=entry(8).key), 4096, BLOCK_BYTES)
    assert said is not None
    assert decode_header(memoryview(said.ljust(4096, b"\0")), BLOCK_BYTES) is None


def test_names_too_long_for_a_header_are_said_so() -> None:
    long = Content(entry(1).content.token_ids, Origin("t" * 5000, b"", "model"))
    assert encode_header(dataclasses.replace(entry(1), content=long), 4096, BLOCK_BYTES) is None


def test_blocks_come_back_also_after_a_restart(tmp_path: Path) -> None:
    with TierRig(tmp_path) as rig:
        assert rig.slots > 40
        assert len(rig.files()) == 3
        assert rig.store(*range(0, 40, 3)) == [OK] * 14
        assert [rig.load(number) for number in range(0, 40, 3)] == [OK] * 14
        assert rig.load(1) is Outcome.BAD
        assert rig.do(rig.erase(3)) == [OK]
        assert rig.load(3) is Outcome.BAD
        assert rig.do(rig.mark(6, 6)) == [OK] and rig.load(6) is OK
        for path in rig.files():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(rig.directory.stat().st_mode) == 0o700
    with TierRig(tmp_path) as rig:
        left = {number: entry(number) for number in range(0, 40, 3) if number != 3}
        assert rig.found == left | {6: dataclasses.replace(entry(6), place=True)}
        assert [rig.load(number) for number in rig.found] == [OK] * 13


def test_swapped_files_are_found_where_they_are(tmp_path: Path) -> None:
    with TierRig(tmp_path) as rig:
        rig.store(2, 3)
        layout = rig.disk.layout
    assert layout is not None
    first, second = (tmp_path / "ssd" / layout.name(number) for number in (0, 1))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with TierRig(tmp_path) as rig:
        moved = layout.file_slots
        assert rig.found == {moved + 2: entry(2), moved + 3: entry(3)}
        assert rig.load(2, moved + 2) is OK
        assert rig.load(2, 2) is Outcome.BAD


def test_the_limit_holds_from_the_first_moment_on(tmp_path: Path) -> None:
    for limit_bytes in (1 << 20, 300 << 10, 150 << 10, 2 << 20, 0):
        directory = tmp_path / "ssd"
        disk = DiskTier(directory, limit_bytes, file_bytes=1 << 18)
        disk.claim()
        assert disk_usage(directory) <= limit_bytes or limit_bytes == 0
        slots = disk.lay_out(BLOCK_BYTES, BLOCK_TOKENS)
        assert disk_usage(directory) <= limit_bytes or limit_bytes == 0
        assert (slots > 0) == (limit_bytes > 0)
        disk.close()
    assert not list((tmp_path / "ssd").glob("*.kv"))


def test_a_smaller_limit_keeps_what_still_fits(tmp_path: Path) -> None:
    with TierRig(tmp_path) as rig:
        rig.store(0, 5, 40)
    with TierRig(tmp_path, limit_bytes=400 << 10) as rig:
        assert 5 < rig.slots < 40
        assert rig.found == {0: entry(0), 5: entry(5)}
        assert [rig.load(number) for number in (0, 5)] == [OK] * 2


def test_blocks_of_another_size_start_empty(tmp_path: Path) -> None:
    with TierRig(tmp_path) as rig:
        rig.store(0)
    disk = DiskTier(tmp_path / "ssd", 1 << 20, file_bytes=1 << 18)
    disk.claim()
    assert dict(disk.scan(lambda: False)) == {0: entry(0)}
    assert disk.lay_out(2 * BLOCK_BYTES, BLOCK_TOKENS) > 0
    assert dict(disk.scan(lambda: False)) == {}
    assert disk_usage(tmp_path / "ssd") <= 1 << 20
    disk.close()


def test_files_of_another_version_go_and_other_peoples_stay(tmp_path: Path) -> None:
    directory = tmp_path / "ssd"
    directory.mkdir(mode=0o700)
    (directory / "v0-4096-9000-15-00000.kv").write_bytes(bytes(100_000))
    (directory / "letter.txt").write_text("dear")
    with TierRig(tmp_path) as rig:
        assert rig.store(1) == [OK]
        assert not (directory / "v0-4096-9000-15-00000.kv").exists()
        assert (directory / "letter.txt").read_text() == "dear"


def test_a_full_disk_is_a_smaller_tier(tmp_path: Path) -> None:
    class SmallDisk(FailingDisk):
        left = 600 << 10

        def allocate(self, file: int, start: int, size: int) -> None:
            if size > self.left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.left -= size
            super().allocate(file, start, size)

    with TierRig(tmp_path, calls=SmallDisk()) as rig:
        assert 20 < rig.slots < 40
        assert rig.store(rig.slots - 1) == [OK]
        assert disk_usage(rig.directory) <= 700 << 10


HOLD = """
import sys
from pathlib import Path
from cache_svc.disk_tier import DiskTier
disk = DiskTier(Path(sys.argv[1]), 1 << 20)
print("there", flush=True)
sys.stdin.read()
"""


def test_a_second_cache_on_the_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "ssd"
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and b"there\n" in process.stdout
        with pytest.raises(Conflict, match=f"process {process.pid}") as caught:
            DiskTier(directory, 1 << 20)
        assert caught.value.field == "ssd_dir"
        process.kill()
        process.wait()
    DiskTier(directory, 1 << 20).close()


@pytest.mark.parametrize("below", ["", "a/b"])
def test_a_file_where_the_directory_should_be_is_refused(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(Conflict, match=r"must be a folder, .*file is not one") as caught:
        DiskTier(file / below, 1 << 20)
    assert (caught.value.field, caught.value.value) == ("ssd_dir", str(file / below))
    assert file.read_text() == "mine"


def test_a_link_is_no_directory_but_may_be_above_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(Conflict, match=r"must be a folder, .*link is not one"):
        DiskTier(tmp_path / "link", 1 << 20)
    DiskTier(tmp_path / "link" / "ssd", 1 << 20).close()
    assert (tmp_path / "there" / "ssd" / "lock").exists()


def test_a_file_that_comes_later_is_an_error_of_that_time(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path / "ssd")
    (tmp_path / "ssd" / "lock").unlink()
    (tmp_path / "ssd").rmdir()
    (tmp_path / "ssd").write_text("")
    with pytest.raises(OSError, match="File exists") as caught:
        directory.ensure()
    assert caught.value.errno == errno.EEXIST
    (tmp_path / "ssd").unlink()
    directory.ensure()
    directory.close()


def test_without_direct_io_the_page_cache_is_used(tmp_path: Path) -> None:
    class NoDirect(FailingDisk):
        def open(self, path: Path, *, direct: bool) -> int:
            if direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().open(path, direct=direct)

    with TierRig(tmp_path, calls=NoDirect()) as rig:
        assert rig.store(3) == [OK]
        assert rig.load(3) is OK
    with TierRig(tmp_path) as rig:
        assert rig.load(3) is OK


def test_payloads_differ() -> None:
    assert payload(1) != payload(2)
