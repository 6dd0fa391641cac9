"""The policy is changed twice and each of two scheduler replicas is killed once, while thirty answers are generated:
every token is that of an undisturbed run, and the decision log of all that is replayed byte for byte."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jitney.client import AsyncClient, Completion, Options
from jitney.errors import InvalidRequest
from jitney.log_segments import LogReader
from jitney.scheduler_codec import decode_snapshot
from jitney.supervisor import Supervisor
from tests.support.default_model import default_model
from tests.support.house import SMALL, tiny_house

ROOT = Path(__file__).parents[2]
SHARED = [7 * i % 500 + 3 for i in range(100)]
ASKS = [
    (
        [*(SHARED if i % 3 == 0 else ()), *((i * 31 + j * 17) % 500 + 3 for j in range(5 + 11 * i % 90))],
        Options(
            max_tokens=60 + 13 * i % 120,
            ignore_eos=True,
            temperature=0.0 if i % 2 else 0.9,
            seed=i + 1,
            priority=i % 3 - 1,
            tenant=f"tenant-{i % 4}",
        ),
    )
    for i in range(30)
]
TOKENS = sum(options.max_tokens or 0 for _, options in ASKS)


class Run:
    """All requests at once; `after` tells when all answers together have so many tokens."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._seen = 0
        self._grew = asyncio.Event()

    async def after(self, share: float) -> None:
        """Returns when that share of all tokens is there."""
        while self._seen < share * TOKENS:
            self._grew.clear()
            await self._grew.wait()

    async def all(self) -> list[Completion]:
        """Every answer."""
        async with AsyncClient(self._target) as client:
            answers = [client.generate(prompt, options) for prompt, options in ASKS]

            async def follow(index: int) -> Completion:
                had = 0
                async for _ in answers[index]:
                    self._seen += len(answers[index].token_ids) - had
                    had = len(answers[index].token_ids)
                    self._grew.set()
                return await answers[index].result()

            return list(await asyncio.gather(*(follow(i) for i in range(len(ASKS)))))


async def undisturbed(house: Supervisor) -> list[Completion]:
    return await Run(house.executor_target).all()


async def disturbed(house: Supervisor) -> list[Completion]:
    run = Run(house.executor_target)

    async def disturb() -> None:
        async with AsyncClient(house.executor_target) as client:
            await run.after(0.1)
            step = await client.set_policy("mlfq", {})
            assert step > 0
            with pytest.raises(InvalidRequest):  # refused by the trial: what decides goes on deciding
                await client.set_policy("fair", {"no_such_parameter": 1})
            await run.after(0.3)
            house.kill("scheduler-0", signal.SIGKILL)
            await run.after(0.5)
            await client.set_policy("fair", {})
            await run.after(0.7)
            house.kill("scheduler-1", signal.SIGKILL)

    disturbing = asyncio.create_task(disturb())
    done = await run.all()
    await disturbing
    return done


def test_no_token_is_lost_or_changed_and_the_log_is_replayed(tmp_path: Path) -> None:
    check(tmp_path / "log", SMALL, None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_on_the_default_model(tmp_path: Path) -> None:
    check(tmp_path / "log", ("--pool-blocks=512",), default_model())


def check(log: Path, executor_args: tuple[str, ...], model: Path | None) -> None:
    with tiny_house(schedulers=2, executor_args=(*executor_args, f"--decision-log={log}"), model=model) as house:
        expected = asyncio.run(undisturbed(house))
        found = asyncio.run(disturbed(house))
        for here, there in zip(found, expected, strict=True):
            assert here.token_ids == there.token_ids and here.text == there.text
        assert house.restarts["scheduler-0"] == house.restarts["scheduler-1"] == 1
    with LogReader(log) as reader:
        policies = [decode_snapshot(frame.snapshot).policy.name for frame in reader]
    assert list(dict.fromkeys(policies)) == ["fcfs", "mlfq", "fair"]
    argv = [sys.executable, "-m", "scheduler_svc.replay", str(log)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
