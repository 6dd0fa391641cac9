"""Hits below the device, through the whole stack: the right tier, the same tokens, and nothing left behind.

Numbers in names are those of docs/reported-faults.md.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from jitney.client import AsyncClient, Client, Completion, Options
from jitney.supervisor import Supervisor
from tests.support.processes import wait_until
from tests.support.tiers import BLOCK_TOKENS, ask, cached, prompt, tiers, written_down

LONG = 20 * BLOCK_TOKENS
POOL = 64
LONG_ANSWER = Options(max_tokens=120, ignore_eos=True)


def fill(client: Client, seeds: range, tokens: int = LONG) -> None:
    """Other prompts take the place of what was there."""
    for seed in seeds:
        ask(client, prompt(seed, tokens), 1)


def at_once(target: str, prompts: Sequence[Sequence[int]], options: Options) -> list[Completion]:
    """Asks for all answers at the same time."""

    async def ask_all() -> list[Completion]:
        async with AsyncClient(target) as client:
            return list(await asyncio.gather(*(client.generate_once(ids, options) for ids in prompts)))

    return asyncio.run(ask_all())


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """A device for three long prompts, a CPU tier for twelve, an SSD for many more."""
    with tiers(tmp_path_factory.mktemp("warm"), pool=POOL, cpu=256, ssd=8192) as house:
        yield house


def test_the_same_answer_from_every_tier(warm: Supervisor) -> None:
    """29: what was stored comes back, from the tier that usage names, and every tier says the same tokens."""
    with Client(warm.executor_target) as client:
        ids = prompt(1, LONG + 5)
        cold = ask(client, ids)
        assert cached(cold) == (0, 0, 0)
        device = ask(client, ids)
        assert cached(device) == (LONG, 0, 0)
        written_down(warm)
        fill(client, range(100, 106))
        cpu = ask(client, ids)
        assert cached(cpu)[1] >= LONG - 2 * BLOCK_TOKENS, cached(cpu)
        fill(client, range(200, 230))
        ssd = ask(client, ids)
        assert cached(ssd)[2] >= LONG // 2, cached(ssd)
        for again in (device, cpu, ssd):
            assert again.token_ids == cold.token_ids
            assert again.finished.usage.computed_prompt_tokens + sum(cached(again)) == len(ids)


def test_a_cold_prefix_that_all_ask_for_at_once_is_computed_once(warm: Supervisor) -> None:
    prefix = prompt(600, 2 * LONG)
    prompts = [[*prefix, *prompt(601 + i, 9)] for i in range(32)]
    done = at_once(warm.executor_target, prompts, Options(max_tokens=4, ignore_eos=True))
    computed = sum(each.finished.usage.computed_prompt_tokens for each in done)
    assert len(prefix) <= computed <= len(prefix) + 32 * (9 + BLOCK_TOKENS), computed
    salted = at_once(warm.executor_target, prompts[:4], Options(max_tokens=4, ignore_eos=True, salt="alone"))
    assert [each.token_ids for each in done[:4]] == [each.token_ids for each in salted]


def test_a_prefix_whose_owner_goes_away_is_passed_on(warm: Supervisor) -> None:
    """And what it had computed of it is not computed again, neither by those that waited for it nor by a retry."""
    prefix = prompt(700, 3 * LONG - 9)

    async def run() -> list[Completion]:
        async with AsyncClient(warm.executor_target) as client:
            owner = client.generate([*prefix, 5], Options(max_tokens=4, ignore_eos=True))
            await anext(owner)
            options = Options(max_tokens=4, ignore_eos=True)
            others = [asyncio.create_task(client.generate_once([*prefix, 6 + i], options)) for i in range(4)]
            while (await client.status()).num_running < 1:
                await asyncio.sleep(0)
            await owner.aclose()
            done = [await other for other in others]
            return [*done, await client.generate_once([*prefix, 5], options)]

    done = asyncio.run(run())
    assert sum(each.finished.usage.computed_prompt_tokens for each in done) <= len(prefix) + 6 * 2 * BLOCK_TOKENS
    with Client(warm.executor_target) as client:
        for last, each in zip((6, 7, 8, 9, 5), done, strict=True):
            assert ask(client, [*prefix, last], 4, salt="alone").token_ids == each.token_ids


def test_a_retry_gets_further(warm: Supervisor) -> None:
    """A prefill that is cancelled again and again is done in the end."""
    ids = prompt(800, 3 * LONG - 9)

    async def run() -> list[int]:
        found = [0]
        async with AsyncClient(warm.executor_target) as client:
            while found[-1] < len(ids) - BLOCK_TOKENS and len(found) < 60:
                answer = client.generate(ids, Options(max_tokens=1))
                await anext(answer)
                await asyncio.sleep(0.002 * len(found))
                await answer.aclose()
                while (status := await client.status()).num_running or status.num_waiting:
                    await asyncio.sleep(0.002)
                found.append((await client.explain_cache(ids)).device_tokens)
        return found

    found = asyncio.run(run())
    assert found == sorted(found) and found[-1] >= len(ids) - BLOCK_TOKENS, found


def test_what_was_computed_past_a_stop_is_not_found(warm: Supervisor) -> None:
    with Client(warm.executor_target) as client:
        ids = prompt(850, 2 * BLOCK_TOKENS - 1)
        whole = ask(client, ids, 3 * BLOCK_TOKENS, salt="whole").token_ids
        for at in range(BLOCK_TOKENS - 2, BLOCK_TOKENS + 4):
            said = next(i for i, token in enumerate(whole) if i >= at and token not in whole[:i]) + 1
            salt = f"stopped-{at}"
            options = Options(
                max_tokens=3 * BLOCK_TOKENS, stop_token_ids=(whole[said - 1],), ignore_eos=True, salt=salt
            )
            done = client.generate_once(ids, options)
            assert len(done.token_ids) in (said - 1, said)
            wait_until(lambda: client.status().num_running == 0)
            found = client.explain_cache([*ids, *whole], salt)
            assert found.pending_tokens == 0
            assert found.device_tokens <= (len(ids) + said) // BLOCK_TOKENS * BLOCK_TOKENS, found


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param((300, 0), id="device"),
        pytest.param((340, 6), id="cpu"),
        pytest.param((380, 30), id="ssd"),
    ],
)
def test_17_another_salt_hits_nothing(warm: Supervisor, seeds: tuple[int, int]) -> None:
    first, between = seeds
    with Client(warm.executor_target) as client:
        ids = prompt(first, LONG + 5)
        mine = ask(client, ids, salt="a")
        written_down(warm)
        fill(client, range(first + 1, first + 1 + between))
        for other in ("b", ""):
            theirs = ask(client, ids, salt=other)
            assert cached(theirs) == (0, 0, 0)
            assert theirs.token_ids == mine.token_ids
        assert sum(cached(ask(client, ids, salt="a"))) >= LONG // 2


@pytest.mark.slow
def test_13_prompts_around_a_block_edge_in_every_tier(warm: Supervisor) -> None:
    with Client(warm.executor_target) as client:
        for blocks in (1, 2, 5):
            for length in (blocks * BLOCK_TOKENS - 1, blocks * BLOCK_TOKENS, blocks * BLOCK_TOKENS + 1):
                ids = prompt(1000 + length, length)
                cold = ask(client, ids)
                for between in (0, 6, 30):
                    fill(client, range(2000 + 40 * length, 2000 + 40 * length + between))
                    again = ask(client, ids)
                    assert again.token_ids == cold.token_ids
                    assert sum(cached(again)) <= length - 1
                follow = ask(client, [*ids, *cold.token_ids, 7])
                assert (
                    sum(cached(follow))
                    >= (length + len(cold.token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS
                )


def test_20_the_ssd_is_warm_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(i, LONG + 3) for i in range(8)]
    with tiers(tmp_path, pool=POOL, cpu=64, ssd=1024) as house, Client(house.executor_target) as client:
        expected = [ask(client, ids).token_ids for ids in prompts]
        written_down(house)
        fill(client, range(100, 108))
    monkeypatch.setenv("PYTHONHASHSEED", "1234")
    with tiers(tmp_path, pool=POOL, cpu=64, ssd=1024) as house, Client(house.executor_target) as client:
        hits = []
        for ids, tokens in zip(prompts, expected, strict=True):
            done = ask(client, ids)
            assert done.token_ids == tokens
            hits.append(cached(done)[2])
        assert sum(hit >= LONG // 2 for hit in hits) >= 6, hits


def test_18_19_another_model_finds_nothing_of_the_old_one(tmp_path: Path) -> None:
    ids = prompt(1, LONG + 3)
    with tiers(tmp_path, cpu=64, ssd=1024) as house, Client(house.executor_target) as client:
        ask(client, ids)
        fill(client, range(100, 108))
    with tiers(tmp_path, cpu=64, ssd=1024, seed=1) as house, Client(house.executor_target) as client:
        new = ask(client, ids)
        assert cached(new) == (0, 0, 0)
    with tiers(tmp_path / "fresh", cpu=64, seed=1) as house, Client(house.executor_target) as client:
        assert ask(client, ids).token_ids == new.token_ids


def truncated(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for at in range(2048, len(content), 4096):
        content[at] ^= 1
    path.write_bytes(content)


def reversed_slots(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(b"".join(content[at : at + 8192] for at in range(len(content) - 8192, -1, -8192)))


def foreign(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def unreadable(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    path.mkdir()
    assert size


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "harm",
    [
        *(pytest.param(harm, id=harm.__name__) for harm in (halved, flipped, missing)),
        *(
            pytest.param(harm, id=harm.__name__, marks=pytest.mark.slow)
            for harm in (truncated, reversed_slots, foreign, unreadable)
        ),
    ],
)
def test_26_files_that_were_harmed_while_nothing_ran(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    prompts = [prompt(i, LONG + 3) for i in range(3)]
    with tiers(tmp_path, pool=POOL, cpu=64, ssd=256) as house, Client(house.executor_target) as client:
        expected = [ask(client, ids).token_ids for ids in prompts]
        fill(client, range(100, 104))
    slots = [path for path in (tmp_path / "ssd").rglob("*") if path.is_file() and path.stat().st_size >= 1 << 20]
    assert slots
    for path in slots:
        harm(path)
    with tiers(tmp_path, pool=POOL, cpu=64, ssd=256) as house, Client(house.executor_target) as client:
        for ids, tokens in zip(prompts, expected, strict=True):
            assert ask(client, ids).token_ids == tokens
        fill(client, range(200, 204))
        assert [ask(client, ids).token_ids for ids in prompts] == expected


def test_26_files_that_are_harmed_while_all_runs(tmp_path: Path) -> None:
    prompts = [prompt(i, LONG + 3) for i in range(6)]
    with tiers(tmp_path, pool=POOL, cpu=64, ssd=1024) as house, Client(house.executor_target) as client:
        expected = [ask(client, ids).token_ids for ids in prompts]
        fill(client, range(100, 106))
        for path in (tmp_path / "ssd").rglob("*"):
            if path.is_file() and path.stat().st_size >= 1 << 20:
                with path.open("r+b") as file:
                    for at in range(2048, path.stat().st_size, 4096):
                        file.seek(at)
                        file.write(b"harm")
        assert [ask(client, ids).token_ids for ids in prompts] == expected


@pytest.mark.slow
def test_27_the_ssd_never_passes_its_limit(tmp_path: Path) -> None:
    def used() -> int:
        return sum(path.stat().st_blocks * 512 for path in (tmp_path / "ssd").rglob("*") if path.is_file())

    with tiers(tmp_path, pool=POOL, cpu=64, ssd=512) as house, Client(house.executor_target) as client:
        for seed in range(60):
            ask(client, prompt(seed, LONG), 1)
            assert used() <= 4 << 20
    assert used() > 1 << 20
    with tiers(tmp_path, pool=POOL, cpu=64, ssd=128) as house, Client(house.executor_target) as client:
        assert used() <= 1 << 20
        for seed in range(20):
            ask(client, prompt(seed, LONG), 1)
            assert used() <= 1 << 20


@pytest.mark.parametrize("cpu", [0, 1])
def test_30_no_room_to_swap_is_recomputed(tmp_path: Path, cpu: int) -> None:
    """More answers than the pool holds, all long, and nowhere to go."""
    prompts = [prompt(i, 40) for i in range(6)]
    with tiers(tmp_path, pool=24, cpu=cpu) as house, Client(house.executor_target) as client:
        done = at_once(house.executor_target, prompts, LONG_ANSWER)
        assert sum(each.finished.usage.preemptions for each in done) > 0
        alone = [client.generate_once(ids, LONG_ANSWER).token_ids for ids in prompts]
        assert [each.token_ids for each in done] == alone
        wait_until(lambda: client.status().num_running == 0)


def test_15_sessions_come_back_to_their_own_words(tmp_path: Path) -> None:
    """60 sessions, four times the pool and one and a half times the CPU tier, each returned to three times."""
    sessions = [prompt(500 + i, 4 * BLOCK_TOKENS + i % BLOCK_TOKENS) for i in range(60)]
    with tiers(tmp_path, pool=POOL, cpu=160, ssd=1024) as house, Client(house.executor_target) as client:
        expected = [ask(client, ids).token_ids for ids in sessions]
        for _ in range(3):
            for ids, tokens in zip(sessions, expected, strict=True):
                done = ask(client, ids)
                assert done.token_ids == tokens
                assert done.finished.usage.computed_prompt_tokens + sum(cached(done)) == len(ids)
            fill(client, range(900, 903), 30)
