"""One load against one server: sends the requests at their times, notes when tokens come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from bench.common import percentile
from bench.peers.loads import Ask, Load
from bench.peers.servers import Failed, Server, Usage

SAMPLE_S = 0.5


@dataclass(slots=True)
class Course:
    """Of one request, in seconds of the monotonic clock: when it was sent, when tokens came and how many."""

    ask: Ask
    sent_s: float
    came: list[tuple[float, int]] = field(default_factory=list)

    def heard(self, tokens: int) -> None:
        """Now."""
        self.came.append((time.perf_counter(), tokens))

    @property
    def tokens(self) -> int:
        """That came."""
        return sum(tokens for _, tokens in self.came)

    @property
    def ttft_s(self) -> float:
        """Until the first came."""
        return self.came[0][0] - self.sent_s

    def gaps_s(self) -> list[float]:
        """Between its tokens; those that came together share the time."""
        gaps: list[float] = []
        for (before, _), (at, tokens) in itertools.pairwise(self.came):
            gaps += [(at - before) / tokens] * tokens
        return gaps


@dataclass(frozen=True, slots=True)
class Taken:
    """How it went, in all."""

    tokens_per_s: float
    ttft_ms_mean: float
    ttft_ms_p99: float
    gap_ms_mean: float
    gap_ms_p99: float
    peak_mib: float
    seconds: float
    others_cores: float  # that other processes of the machine used meanwhile: figures are clean near 0
    cut: bool  # it took longer than it may; what came until then counts


async def take(server: Server, load: Load, asks: Sequence[Ask], limit_s: float) -> Taken:
    """Raises Failed if an answer is not whole, or if nothing came in `limit_s`."""
    followed: list[Course] = []
    cut = False
    async with _usage(server.pid) as seen:
        began, own_s = time.perf_counter(), time.process_time()
        try:
            async with asyncio.timeout(limit_s):
                if load.one_by_one:
                    for ask in asks:
                        await _follow(server, ask, began, followed)
                else:
                    await asyncio.gather(*(_follow(server, ask, began, followed) for ask in asks))
        except TimeoutError:
            cut = True
    wall_s, own_s = time.perf_counter() - began, time.process_time() - own_s
    of_machine, of_server = seen[-1].machine_cpu_s - seen[0].machine_cpu_s, seen[-1].cpu_s - seen[0].cpu_s
    others_cores = max(0.0, of_machine - of_server - own_s) / wall_s
    courses = [course for course in followed if course.came]
    if not courses:
        raise Failed(f"no token came in {limit_s:g} s")
    ttfts = [course.ttft_s * 1e3 for course in courses]
    gaps = [gap * 1e3 for course in courses for gap in course.gaps_s()] or [0.0]
    ended = max(course.came[-1][0] for course in courses)
    return Taken(
        tokens_per_s=_speed(load, courses, ended - began),
        ttft_ms_mean=sum(ttfts) / len(ttfts),
        ttft_ms_p99=percentile(ttfts, 99),
        gap_ms_mean=sum(gaps) / len(gaps),
        gap_ms_p99=percentile(gaps, 99),
        peak_mib=max(usage.resident_mib for usage in seen),
        seconds=ended - began,
        others_cores=others_cores,
        cut=cut,
    )


def _speed(load: Load, courses: Sequence[Course], seconds: float) -> float:
    """Generated tokens a second; of a prefill, tokens of prompts; of a fixed batch, while all its rows decode."""
    if load.prefill:
        return sum(len(course.ask.prompt_ids) for course in courses) / sum(course.ttft_s for course in courses)
    if load.fixed_slots > 1:
        all_from = max(course.came[0][0] for course in courses)
        all_to = min(course.came[-1][0] for course in courses)
        inside = sum(tokens for course in courses for at, tokens in course.came if all_from < at <= all_to)
        return inside / (all_to - all_from) if all_to > all_from else 0.0
    return sum(course.tokens for course in courses) / seconds


async def _follow(server: Server, ask: Ask, began: float, followed: list[Course]) -> None:
    wait_s = began + ask.arrival_s - time.perf_counter()
    if wait_s > 0:
        await asyncio.sleep(wait_s)
    course = Course(ask, time.perf_counter())
    followed.append(course)
    await server.generate(ask, course.heard)
    if course.tokens != ask.new_tokens:
        raise Failed(f"{course.tokens} tokens came, {ask.new_tokens} were asked for")


@contextlib.asynccontextmanager
async def _usage(pid: int) -> AsyncIterator[list[Usage]]:
    """What the process tree uses, sampled."""
    seen = [Usage.of(pid)]

    async def sample() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            seen.append(Usage.of(pid))

    task = asyncio.create_task(sample())
    try:
        yield seen
        seen.append(Usage.of(pid))
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
