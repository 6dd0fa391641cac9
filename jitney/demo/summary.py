"""The figures of a run, from the streams as their callers saw them and from the executor's own steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from jitney.client import Status, StepRecord
from jitney.demo.play import Stream
from jitney.demo.plot import bars, resample

PLOT_COLUMNS = 64
PLOT_ROWS = 6


@dataclass(frozen=True, slots=True)
class Summary:
    """What one run showed."""

    requests: int
    completed: int
    cancelled: int
    prompt_tokens: int
    computed_prompt_tokens: int
    output_tokens: int
    seconds: float
    ttft_ms: tuple[float, float]  # p50, p99
    tpot_ms: tuple[float, float]
    prefix_hit_tokens: int
    block_tokens: int
    steps: tuple[StepRecord, ...]
    coasted_steps: int
    preemptions: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the time from the first request to the last token."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_batch(self) -> float:
        """Rows of a step."""
        return sum(step.rows for step in self.steps) / len(self.steps) if self.steps else 0.0

    @property
    def decide_us(self) -> list[int]:
        """Time of each decision, as the executor waited for it."""
        return [step.decide_us for step in self.steps if step.decide_us]

    @property
    def whole(self) -> bool:
        """Every answer arrived, but for the one that was cancelled."""
        return self.cancelled == 1 and self.completed == self.requests - 1

    def line(self) -> str:
        """The last line of the demo."""
        return json.dumps(
            {
                "requests": self.requests,
                "completed": self.completed,
                "cancelled": self.cancelled,
                "output_tokens": self.output_tokens,
                "tokens_per_s": round(self.tokens_per_s, 1),
                "ttft_ms_p50": round(self.ttft_ms[0], 1),
                "tpot_ms_p50": round(self.tpot_ms[0], 1),
                "prefix_hit_tokens": self.prefix_hit_tokens,
                "mean_batch": round(self.mean_batch, 1),
            }
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def summarise(streams: list[Stream], before: Status, after: Status, block_tokens: int) -> Summary:
    """Of a run between two looks at the executor; the second with the history of steps."""
    ttft = [stream.ttft_ms for stream in streams if stream.tokens]
    tpot = [stream.tpot_ms for stream in streams if stream.tokens > 1]
    began = min((stream.sent_s for stream in streams if stream.sent_s), default=0.0)
    ended = max((stream.last_s for stream in streams), default=0.0)
    return Summary(
        requests=len(streams),
        completed=sum(stream.completed for stream in streams),
        cancelled=sum(stream.cancelled for stream in streams),
        prompt_tokens=sum(stream.prompt_tokens for stream in streams),
        computed_prompt_tokens=sum(stream.usage.computed_prompt_tokens for stream in streams),
        output_tokens=sum(stream.tokens for stream in streams),
        seconds=max(0.0, ended - began),
        ttft_ms=(percentile(ttft, 0.5), percentile(ttft, 0.99)),
        tpot_ms=(percentile(tpot, 0.5), percentile(tpot, 0.99)),
        prefix_hit_tokens=sum(stream.usage.cached_tokens for stream in streams),
        block_tokens=block_tokens,
        steps=tuple(step for step in after.history if step.step > before.step and step.rows),
        coasted_steps=after.coasted_steps - before.coasted_steps,
        preemptions=after.preemptions - before.preemptions,
    )


def show(console: Console, found: Summary) -> None:
    """For people; the JSON line comes after it."""
    decide = [micros / 1000 for micros in found.decide_us]
    blocks = found.prefix_hit_tokens // found.block_tokens if found.block_tokens else 0
    lines = [
        ("answers", f"{found.completed} of {found.requests} whole, {found.cancelled} cancelled"),
        ("tokens", f"{found.prompt_tokens} in prompts, {found.output_tokens} out, in {found.seconds:.1f} s"),
        ("speed", f"{found.tokens_per_s:.1f} tokens/s"),
        ("first token", f"p50 {found.ttft_ms[0]:.0f} ms, p99 {found.ttft_ms[1]:.0f} ms"),
        ("each further", f"p50 {found.tpot_ms[0]:.1f} ms, p99 {found.tpot_ms[1]:.1f} ms"),
        ("prefix hits", f"{found.prefix_hit_tokens} tokens, which saved computing {blocks} blocks"),
        ("steps", f"{len(found.steps)}, {found.mean_batch:.1f} rows each on average, {found.preemptions} preemptions"),
        (
            "decisions",
            f"{len(decide)}, p50 {percentile(decide, 0.5):.2f} ms, p99 {percentile(decide, 0.99):.2f} ms"
            f"; {found.coasted_steps} steps without one",
        ),
    ]
    console.print()
    for name, value in lines:
        console.print(f"{name:>13}  {value}")
    console.print()
    console.print("Rows in a step, over time:")
    unicode = (console.encoding or "").lower().startswith("utf")
    columns = max(16, min(PLOT_COLUMNS, console.width - 10))
    for line in bars(resample([(step.at_us, step.rows) for step in found.steps], columns), PLOT_ROWS, unicode):
        console.print(line)
    console.print()
