"""The GPU backends through the three services, with this machine's CPU as their device and the kernels emulated.

Answers of several requests at once, that swap each other out of a small pool, stop where they may and are given up,
against those that the CPU backend gives one at a time. A block that is used while it is being copied ends the executor,
and with it the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache.v1 import cache_pb2_grpc
from jitney.client import AsyncClient, Choice, Client, Completion, FinishReason, Options, Status
from tests.support.tiers import prompt, tiers
from tests.support.tiny_llama import make_tiny_llama

ANSWER = Options(max_tokens=60, ignore_eos=True, logprobs=2)
BLOCKS, CPU_BYTES = 26, 64 << 14
TOLERANCE = 0.02
"""Of a log-probability: the kernels round queries and weights to half precision, in another order."""


def at_once(target: str, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    async def ask_all() -> list[Completion]:
        async with AsyncClient(target) as client:
            return list(await asyncio.gather(*(client.generate_once(ids, ANSWER) for ids in prompts)))

    return asyncio.run(ask_all())


def assert_close(got: Completion | Choice, expected: Completion, *, whole: bool = True) -> int:
    """Token by token, up to one where both tokens were as likely; how many were compared. Not `whole`: as far as it
    goes."""
    for at, (token, other) in enumerate(zip(got.token_ids, expected.token_ids, strict=whole)):
        mine, theirs = got.logprobs[at], expected.logprobs[at]
        if token != other:
            assert theirs.top_logprobs[0] - theirs.top_logprobs[1] < 2 * TOLERANCE, at
            return at
        assert abs(mine.logprob - theirs.logprob) < TOLERANCE, at
    return len(got.token_ids)


def loaded_blocks(cache_target: str) -> int:
    """Blocks that the CPU tier gave back to the device."""
    with grpc.insecure_channel(cache_target) as channel:
        status = cache_pb2_grpc.CacheStub(channel).GetStatus(pb.GetStatusRequest())
    return sum(tier.hit_blocks for tier in status.tiers)


def idle_clean(now: Status) -> bool:
    """Nothing runs or waits, and no block is held."""
    blocks = now.blocks
    return not now.num_running + now.num_waiting and blocks.free + blocks.evictable + blocks.granted == BLOCKS


async def ends_of_all_kinds(target: str, prompts: Sequence[Sequence[int]], expected: Sequence[Completion]) -> int:
    """Answers that stop at a token, at a length, or are given up, and two of one prompt, all at once: each is what the
    CPU says, as far as it goes. How many tokens were compared."""
    async with AsyncClient(target) as client:

        async def stops(row: int) -> int:
            said = expected[row].token_ids
            stop = next(token for at, token in enumerate(said) if at > 8 and token not in said[:at])
            got = await client.generate_once(prompts[row], replace(ANSWER, stop_token_ids=(stop,)))
            compared = assert_close(got, expected[row], whole=False)
            if got.token_ids == said[: len(got.token_ids)]:
                assert got.token_ids[-1] == stop
                assert (got.finished.reason, got.finished.stop_token_id) == (FinishReason.STOP, stop)
            return compared

        async def ends(row: int) -> int:
            got = await client.generate_once(prompts[row], replace(ANSWER, max_tokens=17))
            assert (len(got.token_ids), got.finished.reason) == (17, FinishReason.LENGTH)
            return assert_close(got, expected[row], whole=False)

        async def is_given_up(row: int) -> int:
            async with client.generate(prompts[row], ANSWER) as answer:
                async for _ in answer:
                    if len(answer.token_ids) > 5:
                        break
            return 0

        async def is_said_twice(row: int) -> int:
            both = await client.generate_once(prompts[row], replace(ANSWER, n=2))
            return sum(assert_close(choice, expected[row]) for choice in both.choices)

        compared = await asyncio.gather(stops(0), ends(1), is_given_up(2), is_said_twice(3), stops(4), ends(5))
        async with asyncio.timeout(30):
            while not idle_clean(await client.status()):
                await asyncio.sleep(0.01)
    return sum(compared)


@pytest.mark.parametrize("backend", ["cupy_cuda", pytest.param("torch_cuda", marks=pytest.mark.slow)])
def test_answers_are_those_of_the_cpu_backend(tmp_path: Path, backend: str) -> None:
    model = make_tiny_llama(tmp_path / "model", hidden=256, context=256)
    prompts = [prompt(i, 40 + i) for i in range(6)]
    both = (f"--model={model}", "--arithmetic=fp16")
    with tiers(tmp_path, executor_args=(*both, "--backend=cpu")) as house, Client(house.executor_target) as client:
        expected = [client.generate_once(ids, ANSWER) for ids in prompts]
    with tiers(
        tmp_path,
        pool=BLOCKS,
        executor_args=(*both, f"--backend={backend}", "--emulated", "--lower-tiers=always"),
        cache_args=(f"--cpu-bytes={CPU_BYTES}",),
    ) as house:
        done = at_once(house.executor_target, prompts)
        swapped_in = loaded_blocks(house.cache_target)  # no prompt begins as another does: nobody else loads
        with Client(house.executor_target) as client:
            again = [client.generate_once(ids, ANSWER) for ids in prompts]
            info = client.model_info()
        assert asyncio.run(ends_of_all_kinds(house.executor_target, prompts, expected)) > ANSWER.max_tokens  # type: ignore[operator]
    assert info.backend == backend
    assert not info.bit_invariant
    for answers in (done, again):
        compared = [assert_close(got, alone) for got, alone in zip(answers, expected, strict=True)]
        assert sum(compared) > 3 * ANSWER.max_tokens  # type: ignore[operator]
    assert sum(each.finished.usage.preemptions for each in done) > 0
    assert swapped_in > 0
