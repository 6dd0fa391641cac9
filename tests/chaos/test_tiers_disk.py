"""The SSD fails under load and heals, and other caches come to the same folders: nothing fails but hits."""

from __future__ import annotations

import asyncio
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitney.client.cache import AsyncCacheClient
from jitney.client.cache_types import TierStatus
from jitney.service_process import ServiceProcess
from jitney.supervisor import Supervisor
from tests.support.processes import service, wait_until
from tests.support.tier_bytes import disk_usage
from tests.support.tier_load import Sessions, Tokens, disturbed, left_in, settled, tier
from tests.support.tiers import SSD_SLOT_BYTES, tiers

SSD = 2048
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def sessions() -> Sessions:
    return Sessions(3, 8, 4)


@pytest.fixture(scope="module")
def house(folder: Path) -> Iterator[Supervisor]:
    with tiers(folder, pool=40, cpu=64, ssd=SSD, shared=folder / "shared") as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def alone(house: Supervisor, sessions: Sessions) -> list[list[Tokens]]:
    return asyncio.run(sessions.run(house.executor_target))


def full(house: Supervisor, ssd: Path) -> Callable[[], None]:
    """Nothing that this process writes to a file finds room, its log neither."""
    pid = house.pids["cache"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, UNLIMITED)  # type: ignore[return-value]


def removed(house: Supervisor, ssd: Path) -> Callable[[], None]:
    shutil.rmtree(ssd)
    return lambda: None


def replaced(house: Supervisor, ssd: Path) -> Callable[[], None]:
    """A file stands where the directory was."""
    shutil.rmtree(ssd)
    ssd.touch()
    return ssd.unlink


@pytest.mark.parametrize(
    ("fail", "number"), [(full, 20), (removed, 30), (replaced, 40)], ids=["full", "removed", "replaced"]
)
def test_24_a_disk_that_fails_under_load_and_heals(
    folder: Path,
    house: Supervisor,
    sessions: Sessions,
    alone: list[list[Tokens]],
    fail: Callable[[Supervisor, Path], Callable[[], None]],
    number: int,
) -> None:
    pid = house.pids["cache"]
    new = Sessions(number, 8, 4)  # whose content is to be written meanwhile

    async def ssd() -> TierStatus:
        async with AsyncCacheClient(house.cache_target) as cache:
            return tier(await cache.status(), "ssd")

    async def harm() -> None:
        await new.after(60)
        heal = fail(house, folder / "ssd")
        await new.after(260)
        heal()

    async def run() -> None:
        before = await ssd()
        said, again = await asyncio.gather(
            disturbed(new, house.executor_target, harm), sessions.run(house.executor_target)
        )
        assert again == alone
        await settled(house.executor_target, house.cache_target)
        healed = await ssd()
        if fail is not removed:
            assert sum(healed.errors.values()) > sum(before.errors.values()), healed
            assert healed.dropped_blocks > before.dropped_blocks
        for each in range(1, 40):
            await Sessions(100 * number + each, 8, 1).run(house.executor_target)
            if (await ssd()).stored_blocks > healed.stored_blocks:
                break
        else:
            raise AssertionError(await ssd())
        assert await sessions.run(house.executor_target) == alone
        assert await new.run(house.executor_target) == said
        await settled(house.executor_target, house.cache_target)

    asyncio.run(run())
    assert house.pids["cache"] == pid, "it was not started again"
    assert disk_usage(folder / "ssd") <= SSD * SSD_SLOT_BYTES


def test_a_second_cache_is_kept_from_the_ssd_and_shares_the_memory_folder(
    folder: Path, tmp_path: Path, house: Supervisor, sessions: Sessions, alone: list[list[Tokens]]
) -> None:
    shared = folder / "shared"
    mine = [name for name in left_in(shared) if name.startswith("cache-")]
    second = ServiceProcess("second", "cache_svc", (f"--ssd-dir={folder / 'ssd'}", f"--shared-dir={shared}"), tmp_path)
    second.start()
    wait_until(lambda: second.exit_status() is not None)
    assert second.exit_status() == 1
    assert str(house.pids["cache"]) in second.last_words(), second.last_words()
    for _ in range(2):
        with service("cache_svc", f"--shared-dir={shared}", "--cpu-bytes=1000000", folder=tmp_path) as other:
            caches = [name for name in left_in(shared) if name.startswith("cache-")]
            assert len(caches) == 2 and mine[0] in caches, "what the killed one left is gone, what is in use is not"
            other.signal(signal.SIGKILL)
            wait_until(lambda: other.exit_status() is not None)
    assert asyncio.run(sessions.run(house.executor_target)) == alone
    asyncio.run(settled(house.executor_target, house.cache_target))
