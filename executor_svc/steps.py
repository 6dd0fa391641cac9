"""The step in flight, and what becomes of its result: tokens, stop flags, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from executor_svc.counters import Counters
from executor_svc.endings import Endings
from executor_svc.live_request import LiveRequest, State
from executor_svc.registry import Registry
from executor_svc.request import FinishReason, TokenLogprobs
from executor_svc.step_plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: its rows with their token counts, and which boarding of each it belongs to."""

    plan: StepPlan
    rows: Sequence[LiveRequest]
    tokens: Sequence[int]
    boardings: Sequence[int]
    launched_us: int
    decide_us: int


class Steps:
    """Launch bookkeeping of one step, and its undoing when the result is there."""

    def __init__(self, registry: Registry, endings: Endings, counters: Counters) -> None:
        self._registry = registry
        self._endings = endings
        self._counters = counters

    def launched(self, plan: StepPlan, rows: Sequence[LiveRequest], tokens: Sequence[int], now_us: int) -> None:
        """The rows' tokens are in flight."""
        for request, count in zip(rows, tokens, strict=True):
            self._registry.in_flight_tokens[request.slot] = count
            request.last_launched_step = plan.step
            request.steps += 1
            if not request.first_row_us:
                request.first_row_us = now_us
                self._counters.cached_tokens += request.cached_tokens
                self._counters.of_tenant(int(self._registry.tenant[request.slot])).cached += request.cached_tokens

    def taken(self, flight: InFlight, result: StepResult, now_us: int) -> list[LiveRequest]:
        """Takes the tokens of a completed step and ends rows that are finished; returns the rows that got a token.

        A row that was preempted meanwhile keeps its token; one that ended meanwhile has its token dropped.
        """
        for request, count, boarding in zip(flight.rows, flight.tokens, flight.boardings, strict=True):
            if request.state is State.ENDED:
                continue
            slot = request.slot
            before = request.prompt_tokens - int(self._registry.computed_tokens[slot])
            if request.boardings == boarding and request.state is State.RUNNING:
                self._registry.computed_tokens[slot] += count
                self._registry.in_flight_tokens[slot] = 0
                prompt = max(0, min(count, before))
                request.computed_prompt_tokens += prompt
                self._counters.prompt_tokens += prompt
                self._counters.of_tenant(int(self._registry.tenant[slot])).prompt += prompt
        got: list[LiveRequest] = []
        ids = result.token_ids.tolist()
        for index, row in enumerate(flight.plan.sample_rows.tolist()):
            request = flight.rows[row]
            if request.state is State.ENDED:
                continue
            self._append(request, ids[index], now_us)
            if request.submission.logprobs >= 0 and result.logprobs is not None:
                request.answer.logprobs.append(_logprobs(result, index, request.submission.logprobs))
            got.append(request)
        return got

    def _append(self, request: LiveRequest, token: int, now_us: int) -> None:
        if request.waits:
            self._registry.waiting_token_added(request)
        request.append(token)
        slot = request.slot
        self._registry.generated_tokens[slot] += 1
        self._counters.generated_tokens += 1
        self._counters.of_tenant(int(self._registry.tenant[slot])).generated += 1
        if not request.first_token_us:
            request.first_token_us = now_us
        request.answer.token_ids.append(token)

    def end_finished(self, got: Sequence[LiveRequest], now_us: int) -> bool:
        """Ends the rows whose new token was a stop token, or the last one they may have; whether there were any."""
        ended = False
        for request in got:
            token = int(request.tokens[request.length - 1])
            stopped = token in request.submission.stop_token_ids
            if not stopped and request.generated < request.submission.max_tokens:
                continue
            ended = True
            matched = push_text(request, request.length - stopped)
            if matched is not None:
                self._endings.end(request, FinishReason.STOP, now_us, 0, stop_matched=matched)
            elif stopped:
                self._endings.end(request, FinishReason.STOP, now_us, 0, stop_token_id=token)
            else:
                self._endings.end(request, FinishReason.LENGTH, now_us, 0)
        return ended

    def stream(self, got: Sequence[LiveRequest], now_us: int, step_in_flight: int) -> None:
        """Hands the new tokens on, as text too; a row whose text has matched a stop string ends."""
        for request in got:
            if request.state is State.ENDED:
                continue
            matched = push_text(request, request.length)
            if matched is not None:
                self._endings.end(request, FinishReason.STOP, now_us, step_in_flight, stop_matched=matched)
            elif request.on_change is not None:
                request.on_change()


def push_text(request: LiveRequest, length: int) -> str | None:
    """Turns the tokens before `length` that are not text yet into text; the stop string that has matched, if any."""
    first = request.prompt_tokens + request.streamed
    matched = request.submission.text.push(request.tokens[first:length].tolist())
    request.streamed = length - request.prompt_tokens
    piece = request.submission.text.take()
    if piece:
        request.answer.texts.append(piece)
    return matched


def _logprobs(result: StepResult, index: int, count: int) -> TokenLogprobs:
    assert result.logprobs is not None
    if not count or result.top_ids is None or result.top_logprobs is None:
        return TokenLogprobs(float(result.logprobs[index]))
    return TokenLogprobs(
        float(result.logprobs[index]),
        result.top_ids[index, :count].tolist(),
        result.top_logprobs[index, :count].tolist(),
    )
