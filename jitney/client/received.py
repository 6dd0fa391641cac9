"""What has come of one answer, over all the streams that it took; pure, so that resuming can be tested by itself.

Invariants: the `token_ids`, `logprobs` and `texts` of each choice only grow, and what a caller was shown is exactly
them; the request of a resume is the first request plus what is here, so that nothing is ever generated or shown twice.
"""

from __future__ import annotations

from jitney.client import wire
from jitney.client.types import ChoiceEnd, Completion, Delta, Event, Finished, Started, TokenLogprobs
from jitney.errors import Expired, JitneyError
from jitney.executor.v1 import executor_pb2 as pb


class Part:
    """What has come of one choice; `end` only where there are several."""

    __slots__ = ("end", "logprobs", "text_bytes", "texts", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.texts: list[str] = []
        self.text_bytes = 0
        self.end: ChoiceEnd | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """New tokens and text."""
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.text:
            self.texts.append(delta.text)
            self.text_bytes += len(delta.text.encode())

    def resume(self, part: pb.Resume | pb.ResumeChoice) -> None:
        """Tells an executor what is here."""
        part.token_ids.extend(self.token_ids)
        part.text_bytes_received = self.text_bytes


class Received:
    """Collects the events of one request; `take` the events, `next_request` what to send after a stream broke."""

    __slots__ = ("_hint", "_request", "finished", "parts", "resumed", "started")

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._hint: pb.ResumeHint | None = None
        self.started: Started | None = None
        self.parts = [Part()]  # a Started says that the request's `n` is one that can be
        self.finished: Finished | None = None
        self.resumed = 0

    @property
    def not_identical(self) -> bool:
        """An executor of another fingerprint computed a part of it."""
        return self._hint is not None and self._hint.not_identical

    def take(self, message: pb.GenerateEvent) -> Event | None:
        """The event for the caller; None for what an earlier stream has told already."""
        kind = message.WhichOneof("event")
        if kind == "started":
            self._hint = message.started.hint
            if self.started is not None:
                self.resumed += 1
                return None
            self.parts = [Part() for _ in range(max(1, self._request.n))]
            self.started = wire.started(message.started)
            return self.started
        if kind == "delta":
            part, delta = self.parts[message.delta.choice], wire.delta(message.delta)
            if part.end is not None:
                return None
            part.add(delta)
            return delta
        if kind == "choice_end":
            part = self.parts[message.choice_end.choice]
            if part.end is not None:
                return None
            part.end = wire.choice_end(message.choice_end)
            return part.end
        if kind == "finished":
            self.finished = wire.finished(message.finished)
            return self.finished
        return None  # An event of a newer contract.

    def next_request(self, elapsed_ms: int) -> pb.GenerateRequest:
        """The request that goes on from here, `elapsed_ms` after the first was sent.

        Deadlines run from arrival, so that a later arrival gets what is left. Raises Expired when that is nothing.
        """
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        for name in ("ttft_deadline_ms", "deadline_ms"):
            if name == "ttft_deadline_ms" and any(part.token_ids for part in self.parts):
                request.ClearField("ttft_deadline_ms")
            elif request.HasField(name):
                left = getattr(request, name) - elapsed_ms
                if elapsed_ms > 0 and left < 1:
                    limit = getattr(request, name)
                    raise Expired(f"{name} of {limit} passed", field=name, limit=limit, value=elapsed_ms)
                setattr(request, name, left)
        if self.started is not None and self._hint is not None:
            request.max_tokens = self.started.max_tokens
            request.resume.hint.CopyFrom(self._hint)
            for part in self.parts:
                part.resume(request.resume if len(self.parts) == 1 else request.resume.choices.add())
        return request

    def completion(self) -> Completion:
        """The whole answer; raises JitneyError if it has not ended."""
        if self.started is None or self.finished is None:
            raise JitneyError("the answer has not ended")
        choices = tuple(
            wire.choice(tuple(part.token_ids), part.text, tuple(part.logprobs), part.end or self.finished)
            for part in self.parts
        )
        return Completion(
            started=self.started,
            token_ids=choices[0].token_ids,
            text=choices[0].text,
            logprobs=choices[0].logprobs,
            finished=self.finished,
            choices=choices,
            resumed=self.resumed,
            not_identical=self.not_identical,
        )
