"""Kill -9 of the scheduler and then of the cache under load: every request completes with the tokens of an undisturbed
run, and what was lost is shown."""

from __future__ import annotations

import asyncio
import signal

from jitney.client import AsyncClient, Completion, Options
from jitney.supervisor import Supervisor
from tests.support.house import tiny_house
from tests.support.processes import wait_until

SHARED = [7 * i % 500 + 3 for i in range(100)]
ASKS = [
    (
        [*(SHARED if i % 3 == 0 else ()), *((i * 31 + j * 17) % 500 + 3 for j in range(5 + 11 * i % 90))],
        Options(
            max_tokens=60 + 13 * i % 120,
            ignore_eos=True,
            temperature=0.0 if i % 2 else 0.9,
            seed=i + 1,
            logprobs=2 if i % 5 == 0 else None,
        ),
    )
    for i in range(30)
]


async def all_at_once(target: str, *, after_tokens: dict[int, list[int]] | None = None) -> list[Completion]:
    """Every request at once. A list in `after_tokens` is emptied when all answers together have that many tokens."""
    seen = 0

    async with AsyncClient(target) as client:
        answers = [client.generate(prompt, options) for prompt, options in ASKS]

        async def follow(index: int) -> Completion:
            nonlocal seen
            had = 0
            async for _ in answers[index]:
                seen += len(answers[index].token_ids) - had
                had = len(answers[index].token_ids)
                for at, waiting in (after_tokens or {}).items():
                    if seen >= at:
                        waiting.clear()
            return await answers[index].result()

        return list(await asyncio.gather(*(follow(i) for i in range(len(ASKS)))))


async def with_kills(house: Supervisor) -> list[Completion]:
    scheduler_due, cache_due = [1], [1]

    async def kill() -> None:
        for due, name in ((scheduler_due, "scheduler-0"), (cache_due, "cache")):
            while due:
                await asyncio.sleep(0.005)
            house.kill(name, signal.SIGKILL)

    killing = asyncio.create_task(kill())
    done = await all_at_once(house.executor_target, after_tokens={200: scheduler_due, 1200: cache_due})
    await killing
    return done


def test_every_request_completes_with_the_tokens_of_an_undisturbed_run() -> None:
    with tiny_house() as house:
        expected = asyncio.run(all_at_once(house.executor_target))
        found = asyncio.run(with_kills(house))
        for here, there in zip(found, expected, strict=True):
            assert here.token_ids == there.token_ids
            assert here.text == there.text
            assert here.logprobs == there.logprobs
        assert house.restarts["scheduler-0"] == 1
        assert house.restarts["cache"] == 1

        async def settled() -> None:
            async with AsyncClient(house.executor_target) as client:
                status = await client.status()
                assert status.cache_reopenings == 1
                assert status.num_running == status.num_waiting == 0
                blocks = status.blocks
                assert blocks.free + blocks.evictable + blocks.granted == blocks.total
                again = await client.generate(*ASKS[0]).result()
                assert again.token_ids == expected[0].token_ids

        wait_until(lambda: house.pids["scheduler-0"] > 0 and house.pids["cache"] > 0)
        asyncio.run(settled())
