"""Kill the executor in the middle of its streams: callers of the client library see one uninterrupted answer, with
the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from jitney.client import AsyncAnswer, AsyncClient, Completion, Message, Options, Prompt
from jitney.supervisor import Supervisor
from tests.support.house import tiny_house

LONG = 240
ASKS: list[tuple[Prompt, Options]] = [
    ("one two three", Options(max_tokens=LONG, ignore_eos=True)),
    ("the quick brown fox", Options(max_tokens=LONG, ignore_eos=True, logprobs=3)),
    ([5, 77, 301, 12, 400], Options(max_tokens=LONG, ignore_eos=True, temperature=1.0, seed=11)),
    ([Message("user", "how many?")], Options(max_tokens=LONG, ignore_eos=True, temperature=0.8, seed=12, top_p=0.9)),
    ([Message("system", "be brief"), Message("user", "why?")], Options(max_tokens=LONG, ignore_eos=True, stop=("zq",))),
    ("one two three", Options(max_tokens=LONG, temperature=1.2, seed=13, min_p=0.01, logprobs=0)),
    ("x" * 600, Options(max_tokens=60, ignore_eos=True)),
]


@pytest.fixture(scope="module")
def house() -> Iterator[Supervisor]:
    """Services that the tests may hurt: they come back by themselves."""
    with tiny_house(grace_s=0.2) as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def alone(house: Supervisor) -> list[Completion]:
    """What an executor that nobody hurts answers."""
    return asyncio.run(undisturbed(house.executor_target))


async def undisturbed(target: str) -> list[Completion]:
    """Each alone, one after the other."""
    async with AsyncClient(target) as client:
        return [await client.generate(prompt, options).result() for prompt, options in ASKS]


async def disturbed(house: Supervisor, kill_at: list[int], number: int) -> list[Completion]:
    """All at once; the executor gets a signal each time that all answers together have so many tokens."""
    async with AsyncClient(house.executor_target) as client:
        answers = [client.generate(prompt, options) for prompt, options in ASKS]
        left = sorted(kill_at)
        restarts = house.restarts["executor"]

        async def follow(answer: AsyncAnswer) -> Completion:
            async for _ in answer:
                if left and sum(len(each.token_ids) for each in answers) >= left[0]:
                    del left[0]
                    house.kill("executor", number)
            return await answer.result()

        done = await asyncio.gather(*(follow(answer) for answer in answers))
        assert house.restarts["executor"] - restarts == len(kill_at)
        return done


def what_was_said(done: Completion) -> object:
    """All that a caller may build on."""
    finished = done.finished
    return (
        done.token_ids,
        done.text,
        done.logprobs,
        finished.reason,
        finished.stop_matched,
        finished.usage.prompt_tokens,
    )


@pytest.mark.parametrize(
    ("kill_at", "number"),
    [([1], signal.SIGKILL), ([150, 700], signal.SIGKILL), ([400], signal.SIGTERM)],
    ids=["at-the-first-token", "twice", "drained-too-short"],
)
def test_every_answer_goes_on_with_the_same_tokens(
    house: Supervisor, alone: list[Completion], kill_at: list[int], number: int
) -> None:
    found = asyncio.run(disturbed(house, kill_at, number))
    for here, there in zip(found, alone, strict=True):
        assert what_was_said(here) == what_was_said(there)
        assert not here.not_identical
        assert here.finished.usage.generated_tokens == len(here.token_ids)
    assert sum(done.resumed for done in found) >= 1
