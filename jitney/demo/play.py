"""Sends every request at once and notes what came when; says nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jitney.client import AsyncAnswer, AsyncClient, Delta, Finished, FinishReason, Started, Usage
from jitney.demo.prompts import CHAT_OPTIONS, CHAT_TURNS, Ask
from jitney.errors import JitneyError, Missing


@dataclass(slots=True)
class Stream:
    """One request as its caller sees it. Times are on the monotonic clock; 0: not yet."""

    name: str
    cancel_after: int = 0
    asked_to_end: bool = False
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    finished: Finished | None = None
    error: str = ""
    usage: Usage = field(default_factory=Usage)

    @property
    def state(self) -> str:
        """In one word."""
        if self.error:
            return "failed"
        if self.finished is not None:
            return self.finished.reason.name.lower()
        if self.tokens:
            return "running"
        return "waiting" if self.sent_s else "later"

    @property
    def completed(self) -> bool:
        """Came to its own end, and all of it arrived."""
        ended = self.finished is not None and self.finished.reason.whole
        return ended and self.tokens > 0 and self.tokens == self.usage.generated_tokens

    @property
    def cancelled(self) -> bool:
        """Ended because its caller asked for that."""
        aborted = self.finished is not None and self.finished.reason is FinishReason.ABORTED
        return aborted and self.cancel_after > 0

    @property
    def ttft_ms(self) -> float:
        """Sent to first token."""
        return 1000 * (self.first_s - self.sent_s)

    @property
    def tpot_ms(self) -> float:
        """Mean time of a token after the first; 0 where there is only one."""
        return 1000 * (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


Changed = Callable[[Stream], None]
"""Called after each event of a stream, on the loop's thread."""


def streams(asks: list[Ask]) -> list[Stream]:
    """One for each of the asks, then one for each turn of the chat."""
    singles = [Stream(ask.name, ask.cancel_after) for ask in asks]
    return singles + [Stream(f"chat {turn + 1}") for turn in range(len(CHAT_TURNS))]


async def play(target: str, asks: list[Ask], into: list[Stream], changed: Changed) -> None:
    """Sends all; returns when the last has ended. What goes wrong with one is noted in its stream."""
    async with AsyncClient(target) as client:
        singles = zip(asks, into, strict=False)
        work = [_follow(client.generate(ask.prompt, ask.options), stream, changed) for ask, stream in singles]
        await asyncio.gather(*work, _chat(client, into[len(asks) :], changed))


async def _chat(client: AsyncClient, turns: list[Stream], changed: Changed) -> None:
    chat = client.chat(options=CHAT_OPTIONS)
    for text, stream in zip(CHAT_TURNS, turns, strict=True):
        await _follow(chat.send(text), stream, changed)


async def _follow(answer: AsyncAnswer, stream: Stream, changed: Changed) -> None:
    stream.sent_s = time.monotonic()
    try:
        async with answer:
            async for event in answer:
                if isinstance(event, Started):
                    stream.prompt_tokens = event.prompt_tokens
                elif isinstance(event, Delta):
                    _take(stream, event)
                    if not stream.asked_to_end and 0 < stream.cancel_after <= stream.tokens:
                        stream.asked_to_end = True
                        await _lose_interest(answer)
                elif isinstance(event, Finished):
                    stream.finished, stream.usage = event, event.usage
                changed(stream)
    except JitneyError as error:
        stream.error = error.message
        changed(stream)


def _take(stream: Stream, delta: Delta) -> None:
    if delta.token_ids:
        stream.last_s = time.monotonic()
        stream.first_s = stream.first_s or stream.last_s
        stream.tokens += len(delta.token_ids)
    stream.text += delta.text


async def _lose_interest(answer: AsyncAnswer) -> None:
    """Asks for the end; what is on its way still comes."""
    with contextlib.suppress(Missing):  # It has just ended by itself.
        await answer.abort()
