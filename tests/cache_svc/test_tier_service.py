"""The lower tiers of a cache process, with an executor that copies real bytes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from jitney.block_ops import Release, RequestId, ResultCode, Tier
from jitney.cache.v1 import cache_pb2 as pb
from jitney.errors import Aborted, Conflict, InvalidRequest, Missing
from jitney.keys import salt_digest
from jitney.service_process import ServiceProcess
from jitney.serving.status import from_rpc_error
from jitney.ticket_ops import AbortTicket, LoadDone, Prefetch, StoreOrder, Ticket
from tests.support.ledger_rig import prompt
from tests.support.processes import service, wait_until
from tests.support.tier_bytes import disk_usage
from tests.support.tier_executor import BLOCK_BYTES, TierExecutor

SSD_BYTES = 2 << 20
MEMORY = ("--cpu-bytes=1000000", "--audit-idle-s=0.1")


@contextmanager
def cache(folder: Path, *flags: str) -> Iterator[ServiceProcess]:
    """A cache with a small CPU tier; it must not log an error."""
    with service("cache_svc", f"--shared-dir={folder / 'shared'}", *MEMORY, *flags, folder=folder) as process:
        yield process
    assert not [line for line in (folder / "jitney.log").read_text().splitlines() if '"level": "error"' in line]


def ssd(folder: Path, limit_bytes: int = SSD_BYTES) -> tuple[str, ...]:
    """Flags for an SSD tier in files of a megabyte."""
    return (f"--ssd-dir={folder / 'ssd'}", f"--ssd-bytes={limit_bytes}", "--ssd-file-bytes=1048576")


def test_blocks_go_down_and_come_up(tmp_path: Path) -> None:
    one, two = prompt(1, 2, 3), prompt(4, 5)
    with cache(tmp_path, *ssd(tmp_path)) as process, TierExecutor(process.target, tmp_path) as executor:
        executor.store_below(1, one, Tier.CPU)
        executor.store_below(2, two, Tier.SSD)
        reserved = executor.load_back(3, one)
        assert (reserved.cpu_blocks, reserved.ssd_blocks) == (3, 0)
        executor.load_back(4, two)
        executor.audit()
        status = executor.status()
        cpu, below = status.tiers
        assert (Tier(cpu.tier), Tier(below.tier)) == (Tier.CPU, Tier.SSD)
        assert cpu.slot_bytes == 20480 and cpu.hit_blocks >= 3
        assert cpu.hit_tokens == 4 * cpu.hit_blocks
        assert below.stored_blocks >= 2 and below.written.bytes >= 2 * BLOCK_BYTES
        assert below.written.time_us > 0 and below.written.bytes_per_s > 0
        assert [(each.tenant, each.bytes) for each in cpu.tenants] == [("default", cpu.used_slots * BLOCK_BYTES)]
        assert not status.not_ready and not status.scanning
        assert disk_usage(tmp_path / "ssd") <= SSD_BYTES
        assert process.end(10.0) == 0
    assert not list((tmp_path / "shared").glob("cache-*"))


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_the_ssd_is_warm_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hash_seed: str) -> None:
    wanted, other = prompt(1, 2, 3, 4), prompt(1, 2, 3, 4, salt="other")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with cache(tmp_path, *ssd(tmp_path)) as process, TierExecutor(process.target, tmp_path) as executor:
        executor.store_below(1, wanted, Tier.SSD)
        process.end(0.0)
    assert list((tmp_path / "shared").glob("cache-*"))
    monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    with (
        cache(tmp_path, *ssd(tmp_path)) as process,
        TierExecutor(process.target, tmp_path, incarnation=2) as executor,
    ):
        assert len(list((tmp_path / "shared").glob("cache-*"))) == 1
        wait_until(lambda: not executor.status().scanning)
        hits = executor.hits(wanted)
        assert (hits.device_blocks, hits.cpu_blocks, hits.ssd_blocks) == (0, 0, 4)
        hits = executor.hits(other)
        assert (hits.device_blocks, hits.cpu_blocks, hits.ssd_blocks) == (0, 0, 0)
        assert executor.apply().lower.ssd_read_bytes_per_s > 0  # before anything was read for a request
        assert executor.load_back(1, wanted).ssd_blocks == 4
        assert executor.tier(Tier.SSD).read.bytes == 4 * BLOCK_BYTES
        executor.audit()


def test_what_is_read_ahead_is_a_cpu_hit(tmp_path: Path) -> None:
    wanted = prompt(1, 2, 3)
    with cache(tmp_path, *ssd(tmp_path)) as process, TierExecutor(process.target, tmp_path) as executor:
        executor.store_below(1, wanted, Tier.SSD)
        process.end(5.0)
    with (
        cache(tmp_path, *ssd(tmp_path)) as process,
        TierExecutor(process.target, tmp_path, incarnation=2) as executor,
    ):
        wait_until(lambda: executor.hits(wanted).ssd_blocks == 3)
        executor.tell(Prefetch(RequestId(1), wanted.keys, 2))
        wait_until(lambda: executor.hits(wanted).cpu_blocks == 2)
        reserved = executor.load_back(1, wanted)
        assert (reserved.cpu_blocks, reserved.ssd_blocks) == (2, 1)


def test_an_ssd_alone_works_through_a_few_slots(tmp_path: Path) -> None:
    wanted = prompt(*range(1, 13))
    with (
        cache(tmp_path, "--cpu-bytes=0", *ssd(tmp_path)) as process,
        TierExecutor(process.target, tmp_path, blocks=20) as executor,
    ):
        assert sum(segment.slots for segment in executor.segments) == 32
        assert executor.swap_is_refused(1, wanted, Tier.CPU)
        executor.cache(2, wanted)
        assert executor.swap(2, Tier.SSD).pinned_blocks == 12
        executor.work(lambda: executor.tier(Tier.SSD).used_slots == 12 and not executor.apply().counts.leaving)
        executor.apply(releases=[Release(RequestId(2))])
        executor.evict_all()
        assert executor.load_back(3, wanted).ticket
        executor.audit()


@pytest.mark.parametrize("slots", [0, 1])
def test_without_room_below_the_device_works_alone(tmp_path: Path, slots: int) -> None:
    wanted = prompt(1, 2, 3)
    flags = f"--cpu-bytes={slots * 24576}"
    with cache(tmp_path, flags) as process, TierExecutor(process.target, tmp_path, blocks=4) as executor:
        assert sum(segment.slots for segment in executor.segments) == slots
        executor.cache(1, wanted)
        assert executor.swap(1, Tier.CPU).pinned_blocks <= slots
        executor.apply(releases=[Release(RequestId(1))])
        executor.evict_all()
        executor.cache(2, wanted)
        executor.audit()


def test_blocks_of_another_size_and_processes_without_a_lock_have_their_device_alone(tmp_path: Path) -> None:
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path) as executor:
        assert executor.segments
        free = tmp_path / "free.lock"
        free.touch()
        same = pb.OpenRequest(
            incarnation=1, fingerprint=b"f", blocks=4, block_bytes=BLOCK_BYTES, block_tokens=4, executor="same"
        )
        same.lock_path = str(executor.lock.path)
        assert executor.call(executor.stub.Open, same).segments
        for number, change in enumerate(
            (
                pb.OpenRequest(lock_path=str(free)),
                pb.OpenRequest(lock_path=str(tmp_path / "missing.lock")),
                pb.OpenRequest(block_bytes=2 * BLOCK_BYTES),
                pb.OpenRequest(block_tokens=8),
            )
        ):
            other = pb.OpenRequest()
            other.CopyFrom(same)
            other.MergeFrom(change)
            other.executor = f"other-{number}"
            assert not executor.call(executor.stub.Open, other).segments
        same.ClearField("lock_path")
        assert not executor.call(executor.stub.Open, same).segments


def test_invalidating_counts_every_tier(tmp_path: Path) -> None:
    both, above = prompt(1, 2, 3), prompt(4, 5)
    with cache(tmp_path, *ssd(tmp_path)) as process, TierExecutor(process.target, tmp_path) as executor:
        executor.store_below(1, both, Tier.SSD)
        in_cpu = executor.tier(Tier.CPU).used_slots
        executor.cache(2, above)
        gone = executor.call(executor.stub.Invalidate, pb.InvalidateRequest(tenant="default"))
        assert (gone.device_blocks, gone.cpu_blocks, gone.ssd_blocks) == (2, in_cpu, 3)
        assert executor.hits(both) == executor.hits(prompt(9))
        executor.audit()
        process.end(5.0)
    with (
        cache(tmp_path, *ssd(tmp_path)) as process,
        TierExecutor(process.target, tmp_path, incarnation=2) as executor,
    ):
        wait_until(lambda: not executor.status().scanning)
        assert executor.tier(Tier.SSD).used_slots == 0


def test_what_is_open_is_told_again_on_a_new_stream(tmp_path: Path) -> None:
    wanted = prompt(1, 2, 3)
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path) as executor:
        executor.cache(1, wanted)
        executor.stop()
        assert executor.swap(1, Tier.CPU).leaving_blocks == 3
        executor.listen()
        first = executor.events.get(timeout=10)
        executor.listen()
        again = executor.events.get(timeout=10)
        assert isinstance(first, StoreOrder) and first == again
        executor.handle(first)
        executor.handle(again)  # as an executor does that does not know whether it was heard
        executor.work(lambda: executor.hits(wanted).cpu_blocks == 0 and executor.tier(Tier.CPU).stored_blocks == 3)
        executor.apply(releases=[Release(RequestId(1))])
        executor.evict_all()
        assert executor.load_back(2, wanted).cpu_blocks == 3


def test_wrong_words_end_the_stream_and_harm_nobody(tmp_path: Path) -> None:
    wanted = prompt(1, 2)
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path) as executor:
        executor.store_below(1, wanted, Tier.CPU)
        for call in (LoadDone(Ticket(10**9), 1), AbortTicket(Ticket(10**9))):
            executor.listen()
            executor.tell(call)
            wait_until(lambda: executor.broken is not None)
            assert isinstance(executor.broken, grpc.RpcError)
            assert isinstance(from_rpc_error(executor.broken), Missing)
        with TierExecutor(process.target, tmp_path, executor="other") as other:
            executor.listen()
            executor.say(other.hello())
            wait_until(lambda: executor.broken is not None)
            assert isinstance(executor.broken, grpc.RpcError)
            assert isinstance(from_rpc_error(executor.broken), InvalidRequest)
        executor.listen()
        assert executor.load_back(2, wanted).cpu_blocks == 2
        executor.audit()


def test_streams_of_an_older_epoch_end_and_a_newer_one_takes_over(tmp_path: Path) -> None:
    with cache(tmp_path) as process, TierExecutor(process.target, tmp_path) as old:
        second = old.stub.Tickets(iter([old.hello()]))
        wait_until(lambda: old.broken is not None)
        assert isinstance(old.broken, grpc.RpcError)
        assert isinstance(from_rpc_error(old.broken), Aborted)
        second.cancel()
        old.listen()
        with TierExecutor(process.target, tmp_path, incarnation=2) as new:
            wait_until(lambda: old.broken is not None)
            assert isinstance(from_rpc_error(old.broken), Conflict)
            new.store_below(1, prompt(1), Tier.CPU)


def test_what_is_on_its_way_to_the_ssd_is_written_before_the_end(tmp_path: Path) -> None:
    wanted = prompt(1, 2, 3, 4)
    switch = tmp_path / "switch"
    flags = (f"--shared-dir={tmp_path / 'shared'}", *MEMORY, *ssd(tmp_path))
    with service("tests.support.failing_cache", str(switch), *flags, folder=tmp_path) as process:
        with TierExecutor(process.target, tmp_path) as executor:
            switch.write_text("delay=0.3")
            executor.cache(1, wanted)
            assert executor.swap(1, Tier.SSD).pinned_blocks == 4
            executor.work(lambda: executor.tier(Tier.CPU).stored_blocks == 4)
        process.signal(signal.SIGTERM)
        assert process.end(20.0) == 0
    with (
        cache(tmp_path, *ssd(tmp_path)) as process,
        TierExecutor(process.target, tmp_path, incarnation=2) as executor,
    ):
        wait_until(lambda: executor.hits(wanted).ssd_blocks == 4)
        assert executor.load_back(1, wanted).code is ResultCode.OK


@pytest.mark.parametrize(
    "asked",
    [
        pb.InvalidateRequest(salt_digest=salt_digest("")),
        pb.InvalidateRequest(prefix_key=prompt(1).keys[0]),
    ],
    ids=["salt", "prefix"],
)
def test_what_was_invalidated_during_the_scan_is_not_found(tmp_path: Path, asked: pb.InvalidateRequest) -> None:
    wanted = prompt(1, 2, 3)
    with cache(tmp_path, *ssd(tmp_path)) as process, TierExecutor(process.target, tmp_path) as executor:
        executor.store_below(1, wanted, Tier.SSD)
        process.end(5.0)
    switch = tmp_path / "switch"
    switch.write_text("delay=0.01")
    flags = (f"--shared-dir={tmp_path / 'shared'}", *MEMORY, *ssd(tmp_path))
    with (
        service("tests.support.failing_cache", str(switch), *flags, folder=tmp_path) as process,
        TierExecutor(process.target, tmp_path, incarnation=2) as executor,
    ):
        assert executor.status().scanning
        executor.call(executor.stub.Invalidate, asked)
        while executor.status().scanning:
            assert executor.hits(wanted).ssd_blocks == 0
        assert executor.tier(Tier.SSD).used_slots == 0
        executor.audit()
