"""What has come of one answer, over all the streams that it took; pure, so that resuming can be tested by itself.

Invariants: `token_ids`, `logprobs` and `texts` only grow, and what a caller was shown is exactly them; the request
of a resume is the first request plus what is here, so that nothing is ever generated or shown twice.
"""

from __future__ import annotations

from jitney.client import wire
from jitney.client.types import Completion, Event, Finished, Started, TokenLogprobs
from jitney.errors import Expired, JitneyError
from jitney.executor.v1 import executor_pb2 as pb


class Received:
    """Collects the events of one request; `take` the events, `next_request` what to send after a stream broke."""

    __slots__ = ("_hint", "_request", "finished", "logprobs", "resumed", "started", "text_bytes", "texts", "token_ids")

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._hint: pb.ResumeHint | None = None
        self.started: Started | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.texts: list[str] = []
        self.text_bytes = 0
        self.finished: Finished | None = None
        self.resumed = 0

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    @property
    def not_identical(self) -> bool:
        """An executor of another fingerprint computed a part of it."""
        return self._hint is not None and self._hint.not_identical

    def take(self, message: pb.GenerateEvent) -> Event | None:
        """The event for the caller; None for the Started of a stream that goes on with an earlier one."""
        kind = message.WhichOneof("event")
        if kind == "started":
            self._hint = message.started.hint
            if self.started is not None:
                self.resumed += 1
                return None
            self.started = wire.started(message.started)
            return self.started
        if kind == "delta":
            delta = wire.delta(message.delta)
            self.token_ids.extend(delta.token_ids)
            self.logprobs.extend(delta.logprobs)
            if delta.text:
                self.texts.append(delta.text)
                self.text_bytes += len(delta.text.encode())
            return delta
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
            if name == "ttft_deadline_ms" and self.token_ids:
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
            request.resume.token_ids.extend(self.token_ids)
            request.resume.text_bytes_received = self.text_bytes
        return request

    def completion(self) -> Completion:
        """The whole answer; raises JitneyError if it has not ended."""
        if self.started is None or self.finished is None:
            raise JitneyError("the answer has not ended")
        return Completion(
            started=self.started,
            token_ids=tuple(self.token_ids),
            text=self.text,
            logprobs=tuple(self.logprobs),
            finished=self.finished,
            resumed=self.resumed,
            not_identical=self.not_identical,
        )
