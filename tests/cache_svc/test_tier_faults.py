"""Faults of disk and processes below the device, with real processes and files: nothing is lost but the hit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jitney.block_ops import Release, RequestId, Tier
from jitney.service_process import ServiceProcess
from tests.support.ledger_rig import Prompt, prompt
from tests.support.processes import is_running, service, wait_until
from tests.support.tier_bytes import disk_usage
from tests.support.tier_executor import TierExecutor

SLOT_BYTES = 20480 + 4096
SSD_BYTES = 2 << 20
PROMPTS = [prompt(number, number + 1, number + 2) for number in range(100, 200, 10)]


@contextmanager
def cache(folder: Path, *flags: str, limit_bytes: int = SSD_BYTES) -> Iterator[ServiceProcess]:
    """A cache with CPU tier and SSD tier; how its disk fails stands in `folder`/switch."""
    tiers = (
        f"--shared-dir={folder / 'shared'}",
        f"--ssd-dir={folder / 'ssd'}",
        f"--ssd-bytes={limit_bytes}",
        "--ssd-file-bytes=1048576",
        "--cpu-bytes=1000000",
        "--audit-idle-s=0.1",
    )
    with service("tests.support.failing_cache", str(folder / "switch"), *tiers, *flags, folder=folder) as process:
        yield process
    assert '"level": "error"' not in (folder / "jitney.log").read_text()


def filled(executor: TierExecutor, prompts: list[Prompt]) -> None:
    """All of these are on the SSD."""
    for number, each in enumerate(prompts, 1):
        executor.store_below(number, each, Tier.SSD)


def swap(executor: TierExecutor, request: int, wanted: Prompt) -> None:
    """Has it stored on the SSD, as far as that is possible."""
    executor.cache(request, wanted)
    executor.swap(request, Tier.SSD)
    executor.work(lambda: executor.apply().counts.leaving == 0)
    executor.work(lambda: executor.apply().lower.ssd.queue_blocks == 0)
    executor.apply(releases=[Release(RequestId(request))])
    executor.evict_all()


def test_a_second_cache_on_the_directory_does_not_start(tmp_path: Path) -> None:
    with cache(tmp_path) as first, TierExecutor(first.target, tmp_path) as executor:
        other = tmp_path / "other"
        other.mkdir()
        with (
            pytest.raises(AssertionError, match=f"ended with 1: .*in use by another cache .process {first.pid}"),
            cache(other, f"--ssd-dir={tmp_path / 'ssd'}"),
        ):
            pass
        executor.store_below(1, PROMPTS[0], Tier.SSD)
        assert executor.load_back(2, PROMPTS[0]).ticket
    with cache(tmp_path) as third:
        assert third.serves()


def test_a_smaller_limit_holds_before_anything_is_served(tmp_path: Path) -> None:
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path) as executor:
        filled(executor, PROMPTS[:3])
        process.end(0.0)
    assert disk_usage(tmp_path / "ssd") > SSD_BYTES // 2
    small = (64 << 10) + (64 << 10) + 5 * SLOT_BYTES
    with cache(tmp_path, limit_bytes=small) as process:
        assert disk_usage(tmp_path / "ssd") <= small
        with TierExecutor(process.target, tmp_path, incarnation=2) as executor:
            wait_until(lambda: not executor.status().scanning)
            assert executor.tier(Tier.SSD).slots == executor.tier(Tier.SSD).used_slots == 5
            assert executor.load_back(1, PROMPTS[0]).ssd_blocks == 3
            swap(executor, 2, PROMPTS[4])
            assert executor.tier(Tier.SSD).stored_blocks > 0
            assert disk_usage(tmp_path / "ssd") <= small


def test_the_limit_is_never_exceeded_by_ten_times_as_much(tmp_path: Path) -> None:
    limit_bytes = (64 << 10) + (64 << 10) + 8 * SLOT_BYTES
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.005):
            most = max(most, disk_usage(tmp_path / "ssd"))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for incarnation in (1, 2):
            with (
                cache(tmp_path, limit_bytes=limit_bytes) as process,
                TierExecutor(process.target, tmp_path, incarnation=incarnation) as executor,
            ):
                for number in range(1, 14):
                    swap(executor, number, prompt(*(1000 * incarnation + 10 * number + at for at in range(3))))
                assert executor.tier(Tier.SSD).stored_blocks > 30
                executor.audit()
                process.end(0.0)
    finally:
        over.set()
        watching.join()
    assert 8 * SLOT_BYTES <= most <= limit_bytes


def others_slow(every: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Parameters of which only some run each time: what they have in common is tested without processes too."""
    return [each if each in fast else pytest.param(each, marks=pytest.mark.slow) for each in every]


@pytest.mark.parametrize("name", others_slow(("ENOSPC", "EROFS", "EIO"), ("ENOSPC",)))
def test_a_disk_that_fails_in_mid_load_and_heals(tmp_path: Path, name: str) -> None:
    switch = tmp_path / "switch"
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path) as executor:
        filled(executor, PROMPTS[:1])
        switch.write_text(f"write={name}")
        for number in (1, 2):
            swap(executor, 10 + number, PROMPTS[number])
        failing = executor.tier(Tier.SSD)
        assert failing.dropped_blocks > 0
        assert {each.name: each.calls for each in failing.errors}[name] > 0
        assert executor.hits(PROMPTS[1]).ssd_blocks == 0
        assert executor.load_back(20, PROMPTS[0]).ticket
        assert process.serves()
        switch.write_text("")

        def heals() -> bool:
            swap(executor, 30, PROMPTS[3])
            return executor.tier(Tier.SSD).stored_blocks > failing.stored_blocks

        wait_until(heals)
        executor.audit()


def cut(files: list[Path]) -> None:
    """In the middle of their first block."""
    for path in files:
        os.truncate(path, SLOT_BYTES // 2)


def empty(files: list[Path]) -> None:
    """To nothing."""
    for path in files:
        os.truncate(path, 0)


def flip(files: list[Path]) -> None:
    """A bit in every block."""
    for path in files:
        data = bytearray(path.read_bytes())
        for at in range(4096 + 17, len(data), SLOT_BYTES):
            data[at] ^= 4
        path.write_bytes(data)


def mix_up(files: list[Path]) -> None:
    """All files swap their places; slots of two blocks do too, but for their headers."""
    data = bytearray(files[0].read_bytes())
    first, second = slice(4096, SLOT_BYTES), slice(SLOT_BYTES + 4096, 2 * SLOT_BYTES)
    data[first], data[second] = data[second], data[first]
    files[0].write_bytes(data)
    aside = files[0].with_suffix(".aside")
    files[0].rename(aside)
    files[1].rename(files[0])
    aside.rename(files[1])


def remove(files: list[Path]) -> None:
    """The directory, whole."""
    shutil.rmtree(files[0].parent)


def forge(files: list[Path]) -> None:
    """Bytes of no cache."""
    for path in files:
        path.write_bytes(os.urandom(path.stat().st_size))


DAMAGE = (cut, empty, flip, mix_up, remove, forge)


def without_cpu_copies(executor: TierExecutor) -> None:
    """Pushes everything out of the CPU tier: what comes back comes from the SSD."""
    slots = executor.tier(Tier.CPU).slots
    for number in range(slots // 8 + 2):
        executor.cache(500 + number, other := prompt(*(5000 + 10 * number + at for at in range(8))))
        executor.swap(500 + number, Tier.CPU)
        executor.work(lambda: executor.apply().counts.leaving == 0)
        executor.apply(releases=[Release(RequestId(500 + number))])
        assert other.keys
    executor.evict_all()


@pytest.mark.parametrize("damage", others_slow(DAMAGE, (flip, remove)))
def test_damage_to_a_living_cache_costs_hits_only(tmp_path: Path, damage: Callable[[list[Path]], None]) -> None:
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path) as executor:
        filled(executor, PROMPTS[:3])
        without_cpu_copies(executor)
        damage(sorted((tmp_path / "ssd").glob("*.kv")))
        for number, each in enumerate(PROMPTS[:3], 20):
            executor.load_back(number, each)
        status = executor.tier(Tier.SSD)
        assert status.bad_blocks > 0
        executor.evict_all()
        swap(executor, 30, PROMPTS[5])
        without_cpu_copies(executor)
        assert executor.load_back(31, PROMPTS[5]).ssd_blocks == 3
        executor.audit()
        assert process.serves()


@pytest.mark.parametrize("damage", others_slow(DAMAGE, (mix_up, cut)))
def test_damage_to_a_stopped_cache_costs_hits_only(tmp_path: Path, damage: Callable[[list[Path]], None]) -> None:
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path) as executor:
        filled(executor, PROMPTS[:3])
        process.end(0.0)
    damage(sorted((tmp_path / "ssd").glob("*.kv")))
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path, incarnation=2) as executor:
        wait_until(lambda: not executor.status().scanning)
        for number, each in enumerate(PROMPTS[:3], 20):
            executor.load_back(number, each)
        swap(executor, 30, PROMPTS[5])
        executor.audit()
        assert disk_usage(tmp_path / "ssd") <= SSD_BYTES


def test_slow_reads_hold_up_nobody_else(tmp_path: Path) -> None:
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path) as executor:
        filled(executor, PROMPTS[:1])
        without_cpu_copies(executor)
        (tmp_path / "switch").write_text("hold")
        reserved = executor.board(1, PROMPTS[0], 3)
        assert reserved.ssd_blocks == 3
        executor.cache(2, PROMPTS[1])
        executor.swap(2, Tier.CPU)
        executor.work(lambda: executor.apply().counts.leaving == 0)
        executor.evict_all()
        executor.apply(releases=[Release(RequestId(2))])
        assert executor.load_back(3, PROMPTS[1]).cpu_blocks == 3
        assert executor.tier(Tier.SSD).loaded_blocks == 0
        (tmp_path / "switch").write_text("")
        executor.work(lambda: reserved.ticket in executor.ended)
        assert executor.ended[reserved.ticket] == 3


ZOMBIE = """
import os, signal, sys
from pathlib import Path
from jitney.block_ops import Tier
from jitney.ticket_ops import StoreOrder, slot_id
from tests.support.ledger_rig import prompt
from tests.support.tier_executor import TierExecutor

executor = TierExecutor(sys.argv[1], Path(sys.argv[2]), executor="zombie")
executor.start()
executor.cache(1, prompt(1, 2, 3, 4))
executor.swap(1, Tier.CPU)
order = executor.events.get(timeout=30)
assert isinstance(order, StoreOrder)
slots = [slot_id(slot) for slot in order.slots]
executor.slots.bytes_of(slots[0])[:] = 1
print("slots", *slots, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
for slot in slots:
    executor.slots.bytes_of(slot)[:] = 2  # the rest of its copy
print("copied", flush=True)
sys.stdin.read()
"""


def test_a_zombie_writes_into_slots_that_nobody_has(tmp_path: Path) -> None:
    flags = f"--cpu-bytes={8 * 20484 + 4096}"
    with cache(tmp_path, flags) as process, TierExecutor(process.target, tmp_path, executor="zombie") as executor:
        executor.stop()
        total = executor.tier(Tier.CPU).slots
        command = [sys.executable, "-c", ZOMBIE.replace('executor="zombie")', 'executor="zombie", incarnation=2)')]
        with subprocess.Popen(
            [*command, process.target, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as zombie:
            assert zombie.stdout is not None and zombie.stdin is not None
            words = next(line for line in zombie.stdout if line.startswith("slots")).split()
            wait_until(lambda: stopped(zombie.pid))
            slots = [int(word) for word in words[1:]]
            with TierExecutor(process.target, tmp_path, executor="zombie", incarnation=3, blocks=20) as heir:
                assert heir.tier(Tier.CPU).retired_slots == len(slots)
                one, two = prompt(*range(20, 36)), prompt(40, 41)
                heir.cache(1, one)
                heir.swap(1, Tier.CPU)
                heir.work(lambda: heir.apply().counts.leaving == 0)
                assert heir.tier(Tier.CPU).used_slots == min(16, total - len(slots))
                assert heir.tier(Tier.CPU).retired_slots == len(slots)
                zombie.send_signal(signal.SIGCONT)
                assert "copied\n" in zombie.stdout
                heir.apply(releases=[Release(RequestId(1))])
                heir.evict_all()
                assert heir.load_back(2, one).ticket
                assert heir.tier(Tier.CPU).bad_blocks == 0
                assert heir.tier(Tier.CPU).retired_slots == len(slots)
                zombie.stdin.close()
                zombie.wait()
                wait_until(lambda: heir.tier(Tier.CPU).retired_slots == 0)
                heir.evict_all()
                heir.store_below(3, two, Tier.CPU)
                assert heir.load_back(4, two).cpu_blocks == 2
                heir.audit()


def stopped(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


def test_what_a_killed_executor_had_is_free_again(tmp_path: Path) -> None:
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path) as executor:
        command = [sys.executable, "-c", ZOMBIE.replace("SIGSTOP", "SIGKILL"), process.target, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as killed:
            wait_until(lambda: not is_running(killed.pid))
        wait_until(lambda: executor.tier(Tier.CPU).used_slots + executor.tier(Tier.CPU).retired_slots == 0)
        executor.store_below(1, prompt(1, 2, 3, 4), Tier.CPU)
        executor.audit()
