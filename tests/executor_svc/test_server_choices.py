"""Several answers to one request, with everything real behind the executor's service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from jitney.client import AsyncClient, ChoiceEnd, Completion, Delta, Finished, FinishReason, Options
from jitney.errors import Expired, InvalidRequest, TooLarge
from jitney.supervisor import Supervisor
from tests.support.house import SMALL, tiny_house

PROMPT = [70 + i % 200 for i in range(45)]  # two blocks, and a part of a third


@pytest.fixture(scope="module")
def house() -> Iterator[Supervisor]:
    with tiny_house(grace_s=0.2, executor_args=(*SMALL, "--max-waiting-requests=40")) as supervisor:
        yield supervisor


def options(n: int, **more: object) -> Options:
    return Options(**({"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 9, "n": n} | more))  # type: ignore[arg-type]


async def idle_clean(client: AsyncClient) -> None:
    async with asyncio.timeout(20):
        while True:
            now = await client.status()
            blocks = now.blocks
            free = blocks.free + blocks.evictable + blocks.granted
            if not now.num_running and not now.num_waiting and free == blocks.total:
                return
            await asyncio.sleep(0.02)


def run(house: Supervisor, test: object) -> None:
    async def main() -> None:
        async with asyncio.timeout(300), AsyncClient(house.executor_target) as client:
            await test(client)  # type: ignore[operator]
            await idle_clean(client)

    asyncio.run(main())


def test_choices_of_a_stream_of_a_unary_call_and_alone_agree(house: Supervisor) -> None:
    async def test(client: AsyncClient) -> None:
        answer = client.generate(PROMPT, options(5, logprobs=2))
        events = [event async for event in answer]
        streamed = await answer.result()
        assert sorted(event.choice for event in events if isinstance(event, ChoiceEnd)) == [0, 1, 2, 3, 4]
        assert isinstance(events[-1], Finished)
        once = await client.generate_once(PROMPT, options(5, logprobs=2))
        single = await client.generate(PROMPT, options(1, logprobs=2)).result()
        assert once.choices == streamed.choices
        assert streamed.choices[0] == single.choices[0]
        assert len({choice.token_ids for choice in streamed.choices}) == 5
        for at, choice in enumerate(streamed.choices):
            assert choice.reason is FinishReason.LENGTH and len(choice.token_ids) == len(choice.logprobs) == 40
            deltas = [event for event in events if isinstance(event, Delta) and event.choice == at]
            assert "".join(event.text for event in deltas) == choice.text
        cold = (await client.generate(PROMPT, options(5, salt="cold")).result()).finished.usage
        assert (cold.prompt_tokens, cold.cached_tokens, cold.generated_tokens) == (45, 0, 200)
        assert 45 + 4 <= cold.computed_prompt_tokens <= 45 + 4 * 13  # the two full blocks once
        assert cold.billable_microtokens == (45 + 200) * 1_000_000

    run(house, test)


def test_each_choice_ends_by_itself(house: Supervisor) -> None:
    async def test(client: AsyncClient) -> None:
        free = await client.generate(PROMPT, options(4)).result()
        stop = free.choices[2].token_ids[9]
        done = await client.generate(PROMPT, options(4, stop_token_ids=[stop])).result()
        for stopped, whole in zip(done.choices, free.choices, strict=True):
            if stop in whole.token_ids:
                assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
                assert (stopped.reason, stopped.stop_token_id) == (FinishReason.STOP, stop)
            else:
                assert (stopped.token_ids, stopped.reason) == (whole.token_ids, FinishReason.LENGTH)
        assert done.finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
        short = await client.generate(PROMPT, options(4, max_tokens=1)).result()
        assert [choice.token_ids for choice in short.choices] == [choice.token_ids[:1] for choice in free.choices]

    run(house, test)


def test_one_cancel_one_abort_and_one_deadline_end_all_choices(house: Supervisor) -> None:
    async def test(client: AsyncClient) -> None:
        for after in (1, 20):
            async with client.generate(PROMPT, options(6, max_tokens=200)) as answer:
                got = 0
                async for event in answer:
                    got += isinstance(event, Delta)
                    if got == after:
                        break
            await idle_clean(client)
        answer = client.generate(PROMPT, options(6, max_tokens=200))
        reasons = []
        asked = False
        async for event in answer:
            if isinstance(event, ChoiceEnd):
                reasons.append(event.reason)
            elif isinstance(event, Delta) and not asked:
                asked = True
                await answer.abort()
        assert reasons == [FinishReason.ABORTED] * 6
        assert answer.finished is not None and answer.finished.reason is FinishReason.ABORTED
        with pytest.raises(Expired):
            await client.generate_once(PROMPT, options(6, max_tokens=200, deadline_ms=50))

    run(house, test)


def test_refusals_name_field_limit_and_value(house: Supervisor) -> None:
    async def test(client: AsyncClient) -> None:
        for n, max_tokens, field in ((33, 5, "n"), (-1, 5, "n"), (2, 0, "max_tokens"), (2, -1, "max_tokens")):
            with pytest.raises(InvalidRequest) as caught:
                await client.generate(PROMPT, options(n, max_tokens=max_tokens)).result()
            assert caught.value.field == field
        both = [client.generate(PROMPT, options(32, max_tokens=200)), client.generate(PROMPT, options(32))]
        first = asyncio.create_task(both[0].result())
        while not (both[0].started):
            await asyncio.sleep(0.01)
        with pytest.raises(TooLarge) as full:
            await both[1].result()
        assert (full.value.field, full.value.limit) == ("queue", "40")
        await both[0].abort()
        assert (await first).finished.reason is FinishReason.ABORTED

    run(house, test)


def test_an_executor_killed_meanwhile_changes_no_choice(house: Supervisor) -> None:
    asked = options(4, max_tokens=120, logprobs=1)

    async def test(client: AsyncClient) -> None:
        alone = await client.generate(PROMPT, asked).result()
        for after in (3, 300):
            answer = client.generate(PROMPT, asked)
            got = 0
            async for event in answer:
                got += len(event.token_ids) if isinstance(event, Delta) else 0
                if got >= after > 0:
                    house.kill("executor", 9)
                    after = 0
            done: Completion = await answer.result()
            assert done.choices == alone.choices
            assert done.resumed >= 1 and done.finished.usage.generated_tokens == 480

    run(house, test)
