"""The demo's parts: what it sends, how it counts and draws. The whole of it runs in tests/e2e/test_demo.py."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

from rich.console import Console

from jitney.client import AsyncClient, BlockCounts, Options, Policy, Status, StepRecord
from jitney.demo.board import board, draw, tail
from jitney.demo.play import Stream, play, streams
from jitney.demo.plot import bars, resample
from jitney.demo.prompts import Ask, asks
from jitney.demo.summary import Summary, percentile, show, summarise
from jitney.errors import TooLarge
from tests.support.scripted_executor import IDS, TEXT, Break, ScriptedExecutor, serving


def status(step: int, history: tuple[StepRecord, ...] = ()) -> Status:
    """A look at an executor that has done so many steps."""
    return Status(
        executor="x", incarnation=1, step=step, num_running=0, num_waiting=0, blocks=BlockCounts(),
        scheduler_connected=True, cache_connected=True, decisions=0, coasted_steps=step, preemptions=0, finished={},
        refused=0, prompt_tokens=0, cached_tokens=0, generated_tokens=0, waiting_reasons={}, history=history,
        policy=Policy("fcfs"), not_ready="", scheduler_build="", cache_reopenings=0, decide_us_p50=0, decide_us_p99=0,
        backend="native",
    )  # fmt: skip


def a_step(step: int, rows: int, decide_us: int) -> StepRecord:
    """One step."""
    return StepRecord(step, 1000 * step, rows, rows, 0, 900, decide_us, 0, 9)


def play_against(executor: ScriptedExecutor, console: Console, todo: list[Ask]) -> tuple[list[Stream], Summary]:
    """Plays without the supervisor."""

    async def run() -> tuple[list[Stream], Summary]:
        async with serving(executor) as target:
            found = streams(todo)
            async with board(console, found) as changed:
                await play(target, todo, found, changed)
            async with AsyncClient(target) as client:
                after = await client.status(1)
            return found, summarise(found, status(0), after, block_tokens=16)

    return asyncio.run(run())


def few() -> list[Ask]:
    """A few requests, one of which is cancelled half way."""
    return [Ask("one", "a", Options()), Ask("two", "b", Options()), Ask("cancelled", "c", Options(), cancel_after=8)]


def test_the_demo_sends_thirty_requests_of_many_kinds() -> None:
    todo = asks()
    assert len(streams(todo)) == 30
    assert sum(ask.cancel_after > 0 for ask in todo) == 1
    assert len({ask.name for ask in todo}) >= 12
    assert all(ask.options.max_tokens for ask in todo)
    assert all(ask.options.seed is not None for ask in todo if ask.options.temperature)


def test_lines_and_summary_of_a_whole_run() -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, highlight=False, markup=False, emoji=False)
    found, summary = play_against(ScriptedExecutor(pause_s=0.005), console, few())
    assert (summary.requests, summary.completed, summary.cancelled, summary.whole) == (6, 5, 1, True)
    assert [stream.state for stream in found] == ["stop", "stop", "aborted", "stop", "stop", "stop"]
    assert 5 * len(IDS) + 8 <= summary.output_tokens < 6 * len(IDS)
    assert summary.prefix_hit_tokens == 6 * 4
    assert text.getvalue().count("\n") == 6
    assert TEXT[:10] in text.getvalue()
    line = json.loads(summary.line())
    assert list(line) == [
        "requests", "completed", "cancelled", "output_tokens", "tokens_per_s", "ttft_ms_p50", "tpot_ms_p50",
        "prefix_hit_tokens", "mean_batch",
    ]  # fmt: skip
    assert line["tokens_per_s"] > 0 and line["ttft_ms_p50"] > 0 and line["mean_batch"] == 4.0


def test_a_live_board_ends_with_every_stream() -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, height=50, force_terminal=True, highlight=False)
    _, summary = play_against(ScriptedExecutor(), console, few())
    assert summary.completed >= 5
    assert "chat 3" in text.getvalue()


def test_a_picture_shows_the_board_and_the_summary(tmp_path: Path) -> None:
    found, summary = play_against(ScriptedExecutor(), Console(file=io.StringIO()), few())
    draw(tmp_path / "demo.svg", found, summary)
    content = (tmp_path / "demo.svg").read_text(encoding="utf-8")
    assert content.startswith("<svg") and "answers" in content and "cancelled" in content
    assert len(content) < 200_000


def test_an_answer_that_failed_makes_the_run_not_whole() -> None:
    executor = ScriptedExecutor([Break(2, error=TooLarge("the queue is full"))], pause_s=0.001)
    console = Console(file=io.StringIO(), width=120)
    found, summary = play_against(executor, console, few())
    failed = [stream for stream in found if stream.state == "failed"]
    assert [stream.error for stream in failed] == ["the queue is full"]
    assert not summary.whole


def test_the_summary_counts_only_the_steps_of_the_run() -> None:
    steps = (a_step(4, 9, 0), a_step(5, 2, 100), a_step(6, 0, 50), a_step(7, 4, 300))
    summary = summarise([], status(4), status(7, steps), 16)
    assert (len(summary.steps), summary.mean_batch, summary.decide_us) == (2, 3.0, [100, 300])
    assert (summary.tokens_per_s, summary.coasted_steps) == (0.0, 3)
    text = io.StringIO()
    show(Console(file=text, width=100), summary)
    assert "decisions  2, p50 0.10 ms, p99 0.30 ms; 3 steps without one" in text.getvalue()


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50.0, 99.0, 7.0)
    assert percentile([], 0.5) == 0.0


def test_bars_fill_with_the_highest_value() -> None:
    assert bars([0.0, 4.0, 8.0], rows=2) == ["  8.0 ┤  █", "  4.0 ┤ ██"]
    assert bars([0.0, 1.0], rows=1, unicode=False) == ["  1.0 | #"]
    assert bars([], rows=3) == []
    assert bars([0.0], rows=1) == ["  1.0 ┤ "]


def test_resampling_keeps_the_means_of_equal_spans() -> None:
    assert resample([(0.0, 1.0), (1.0, 3.0), (9.0, 8.0), (10.0, 10.0)], 2) == [2.0, 9.0]
    assert resample([(0.0, 5.0), (10.0, 7.0)], 4) == [5.0, 5.0, 5.0, 7.0]
    assert resample([(3.0, 5.0)], 2) == [5.0, 5.0]
    assert resample([], 3) == []


def test_the_tail_of_a_text_is_one_line_that_fits() -> None:
    stream = Stream("x", text="many words\nin two lines")
    assert tail(stream, 40) == "many words in two lines"
    assert tail(stream, 8) == "…o lines"
    assert len(tail(stream, 8)) == 8
