"""One answer while it is generated: its events, and all that came so far. Takes broken streams up again by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

import grpc
import grpc.aio

from jitney.client.received import Received
from jitney.client.retry import Patience, RetryPolicy, as_error, is_lost
from jitney.client.types import Completion, Delta, Event, Finished, Started, TokenLogprobs
from jitney.errors import Aborted, Away, Duplicate, JitneyError
from jitney.executor.v1 import executor_pb2 as pb

OnFinished = Callable[["AsyncAnswer"], None]


class EventCall(Protocol):
    """A call of Generate."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateEvent]:
        """Its messages."""

    def cancel(self) -> bool:
        """Ends it from this side."""


class AsyncAnswer:
    """An async iterator of Started, Delta ... Finished; with n > 1, of a ChoiceEnd for each choice too. Tokens and text
    come exactly once, however often its executor went away meanwhile.

    An answer that was taken in ends with a Finished that says why (aborted and past a deadline, too); raised is what
    kept it from that: a class of `jitney.errors`. Nothing is sent before the first event is asked for.
    Leaving `async with`, `aclose`, or cancelling the task that reads ends the work in the executor too.
    """

    def __init__(
        self,
        open_stream: Callable[[pb.GenerateRequest], EventCall],
        abort: Callable[[str], Awaitable[None]],
        request: pb.GenerateRequest,
        retry: RetryPolicy,
        target: str,
        on_finished: OnFinished | None = None,
    ) -> None:
        self._open_stream = open_stream
        self._abort = abort
        self._retry = retry
        self._target = target
        self._on_finished = on_finished
        self._received = Received(request)
        self._unwanted = False
        self._events = self._run()
        self.request_id = request.request_id

    @property
    def started(self) -> Started | None:
        """The first event, once it has come."""
        return self._received.started

    @property
    def finished(self) -> Finished | None:
        """The last event, once it has come."""
        return self._received.finished

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What was generated so far; of several choices, of the first. All are in `result()`."""
        return tuple(self._received.parts[0].token_ids)

    @property
    def text(self) -> str:
        """The text so far; it may lag behind the tokens. Of several choices, that of the first."""
        return self._received.parts[0].text

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One a token, if asked for. Of several choices, those of the first."""
        return tuple(self._received.parts[0].logprobs)

    @property
    def resumed(self) -> int:
        """How often a broken stream was taken up again."""
        return self._received.resumed

    @property
    def not_identical(self) -> bool:
        """An executor of another fingerprint computed a part: the tokens may differ from an undisturbed run's."""
        return self._received.not_identical

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops reading; an answer that has not ended is cancelled."""
        await self._events.aclose()

    async def texts(self) -> AsyncIterator[str]:
        """Only the text, piece by piece; of several choices, that of the first."""
        async for event in self:
            if isinstance(event, Delta) and event.text and not event.choice:
                yield event.text

    async def result(self) -> Completion:
        """Reads to the end and returns the whole answer."""
        async for _ in self:
            pass
        return self._received.completion()

    async def abort(self) -> None:
        """Asks the executor to end the answer; reading then comes to its end, and a broken stream is not taken up.

        Raises Missing if it has ended already.
        """
        self._unwanted = True
        await self._abort(self.request_id)

    async def _run(self) -> AsyncGenerator[Event, None]:
        began = time.monotonic()
        patience: Patience | None = None
        tries = 0
        while True:
            request = self._received.next_request(int(1000 * (time.monotonic() - began)) if tries else 0)
            tries += 1
            call = self._open_stream(request)
            try:
                async for message in call:
                    patience = None
                    event = self._received.take(message)
                    if isinstance(event, Finished) and self._on_finished is not None:
                        self._on_finished(self)
                    if event is not None:
                        yield event
                lost: JitneyError = Away("the stream ended before the answer", field="target", value=self._target)
            except grpc.aio.AioRpcError as error:
                lost = as_error(error, self._target)
                if not self._worth_another_try(error, lost, tries):
                    raise lost from error
            finally:
                call.cancel()
            if self._received.finished is not None:
                return
            if self._unwanted:
                raise Aborted("ended by its caller; its executor went away meanwhile") from lost
            patience = patience or Patience(self._retry, begun=self._received.started is not None)
            wait_s = patience.next_wait_s()
            if wait_s is None:
                raise lost
            await asyncio.sleep(wait_s)

    def _worth_another_try(self, error: grpc.aio.AioRpcError, lost: JitneyError, tries: int) -> bool:
        if self._received.finished is not None:
            return True
        if isinstance(lost, Duplicate):  # An earlier try of ours, which its executor has not missed yet.
            return tries > 1 and self._received.started is None
        return is_lost(error)
