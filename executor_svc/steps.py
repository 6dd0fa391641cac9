"""The steps in flight, and what becomes of their results: tokens, stop flags, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from executor_svc.counters import Counters, ServedTokens
from executor_svc.endings import Endings
from executor_svc.live_request import LiveRequest, State
from executor_svc.registry import Registry, slots_of
from executor_svc.request import FinishReason, TokenLogprobs
from executor_svc.step_plan import StepPlan, StepResult
from jitney.columns import I32, I64


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: its rows with their slots, and which boarding of each it belongs to; and how many rows had left
    before it."""

    plan: StepPlan
    rows: Sequence[LiveRequest]
    slots: I64
    boardings: Sequence[int]
    departures: int
    launched_us: int
    decide_us: int

    @property
    def tokens(self) -> I32:
        """Of each row, padding left out."""
        counts: I32 = np.diff(self.plan.query_start[: len(self.rows) + 1])
        return counts


@dataclass(frozen=True, slots=True)
class Got:
    """The rows of a step that got a token, with their slots, and it."""

    rows: Sequence[LiveRequest] = ()
    slots: I64 = field(default_factory=lambda: slots_of(()))
    tokens: Sequence[int] = ()


class Steps:
    """Launch bookkeeping of one step, and its undoing when the result is there."""

    def __init__(self, registry: Registry, endings: Endings, counters: Counters) -> None:
        self._registry = registry
        self._endings = endings
        self._counters = counters

    def launched(self, plan: StepPlan, rows: Sequence[LiveRequest], slots: I64, tokens: I64, now_us: int) -> None:
        """The rows' tokens are in flight."""
        self._registry.in_flight_tokens[slots] += tokens
        step = plan.step
        for request in rows:
            request.last_launched_step = step
            request.steps += 1
            if not request.first_row_us:
                request.first_row_us = now_us
                self._counters.cached_tokens += request.cached_tokens
                self._served().cached[self._registry.tenant[request.slot]] += request.cached_tokens

    def taken(self, flight: InFlight, result: StepResult, now_us: int) -> Got:
        """Takes the tokens of a completed step; returns the rows that got a token.

        A row that was preempted meanwhile keeps its token; one that ended meanwhile has its token dropped.
        """
        self._computed(flight)
        registry, samples, tokens = self._registry, flight.plan.sample_rows, result.token_ids.tolist()
        rows = flight.rows
        got = rows if len(samples) == len(rows) else [rows[row] for row in samples.tolist()]
        slots = flight.slots[samples]
        if flight.departures != registry.departures:
            there = [i for i, request in enumerate(got) if request.state is not State.ENDED]
            got, slots, tokens = [got[i] for i in there], slots[there], [tokens[i] for i in there]
            for request in got:
                if request.waits:
                    registry.waiting_token_added(request)
        else:
            there = None
        if not got:
            return Got()
        if result.logprobs is not None:
            told = _logprobs(result)
            for index, request in zip(there or range(len(got)), got, strict=True):
                count = request.submission.logprobs
                if count >= 0:
                    own, ids, likely = told[index]
                    request.answer.logprobs.append(TokenLogprobs(own, ids[:count], likely[:count]))
        for request, token in zip(got, tokens, strict=True):
            length, buffer = request.length, request.tokens
            if length == len(buffer):
                request.grow()
                buffer = request.tokens
            buffer[length] = token
            request.length = length + 1
            request.answer.token_ids.append(token)
            if not request.first_token_us:
                request.first_token_us = now_us
        registry.generated_tokens[slots] += 1
        registry.newest_token[slots] = tokens
        self._counters.generated_tokens += len(got)
        np.add.at(self._served().generated, registry.tenant[slots].astype(np.int64), 1)
        return Got(got, slots, tokens)

    def _computed(self, flight: InFlight) -> None:
        """The rows that still run have computed their tokens."""
        registry, state = self._registry, State.RUNNING
        rows, slots, counts = flight.rows, flight.slots, flight.tokens
        if flight.departures != registry.departures:
            running = [
                request.state is state and request.boardings == boarding
                for request, boarding in zip(rows, flight.boardings, strict=True)
            ]
            places = np.flatnonzero(running)
            rows, slots, counts = [rows[i] for i in places.tolist()], slots[places], counts[places]
        uncomputed = registry.prompt_tokens[slots] - registry.computed_tokens[slots]
        prompt = np.minimum(np.maximum(uncomputed, 0), counts)
        registry.computed_tokens[slots] += counts
        registry.in_flight_tokens[slots] -= counts
        prefills = np.flatnonzero(prompt)
        if len(prefills) == 0:
            return
        for i, count in zip(prefills.tolist(), prompt[prefills].tolist(), strict=True):
            rows[i].computed_prompt_tokens += count
            self._counters.prompt_tokens += count
        tenants = registry.tenant[slots[prefills]].astype(np.int64)
        np.add.at(self._served().prompt, tenants, prompt[prefills].astype(np.int64))

    def _served(self) -> ServedTokens:
        """With room for all tenants."""
        served = self._counters.served
        served.reach(len(self._registry.tenants))
        return served

    def end_finished(self, got: Got, now_us: int, step_in_flight: int) -> bool:
        """Ends the rows whose new token was a stop token, or the last one they may have; whether there were any."""
        if not got.rows:
            return False
        registry, slots = self._registry, got.slots
        finished = registry.generated_tokens[slots] >= registry.max_new_tokens[slots]
        stopped = [False] * len(got.tokens)
        if not registry.stop_ids.keys().isdisjoint(got.tokens):
            stopped = [token in request.stop_ids for request, token in zip(got.rows, got.tokens, strict=True)]
            finished = finished | stopped
        ends = np.flatnonzero(finished).tolist()
        for i in ends:
            request = got.rows[i]
            matched = push_text(request, request.length - stopped[i])
            if matched is not None:
                self._endings.end(request, FinishReason.STOP, now_us, step_in_flight, stop_matched=matched)
            elif stopped[i]:
                self._endings.end(request, FinishReason.STOP, now_us, step_in_flight, stop_token_id=got.tokens[i])
            else:
                self._endings.end(request, FinishReason.LENGTH, now_us, step_in_flight)
        return bool(ends)

    def stream(self, got: Got, now_us: int, step_in_flight: int) -> None:
        """Hands the new tokens on, as text too; a row whose text has matched a stop string ends."""
        ended = State.ENDED
        for request, token in zip(got.rows, got.tokens, strict=True):
            if request.state is ended:
                continue
            text = request.submission.text
            if request.streamed + 1 == request.length - request.prompt_tokens:
                matched = text.push((token,))
                request.streamed += 1
                if piece := text.take():
                    request.answer.texts.append(piece)
            else:
                matched = push_text(request, request.length)
            if matched is not None:
                self._endings.end(request, FinishReason.STOP, now_us, step_in_flight, stop_matched=matched)
            elif request.on_change is not None:
                request.on_change()


def push_text(request: LiveRequest, length: int) -> str | None:
    """Turns the tokens before `length` that are not text yet into text; the stop string that has matched, if any."""
    first = request.prompt_tokens + request.streamed
    text = request.submission.text
    matched = text.push(request.tokens[first:length].tolist())
    request.streamed = length - request.prompt_tokens
    if piece := text.take():
        request.answer.texts.append(piece)
    return matched


def _logprobs(result: StepResult) -> list[tuple[float, list[int], list[float]]]:
    """Of each row: its token's, and the ids and log-probabilities of the most likely ones."""
    assert result.logprobs is not None
    none: list[list[Any]] = [[]] * len(result.logprobs)
    ids = none if result.top_ids is None else result.top_ids.tolist()
    likely = none if result.top_logprobs is None else result.top_logprobs.tolist()
    return list(zip(result.logprobs.tolist(), ids, likely, strict=True))
