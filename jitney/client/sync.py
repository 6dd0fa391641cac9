"""The same client for code without an event loop: every call runs the async one on one background thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from jitney.client.aio import DEFAULT_TARGET, AsyncClient
from jitney.client.answer import AsyncAnswer
from jitney.client.chat import AsyncChat
from jitney.client.retry import RetryPolicy
from jitney.client.types import (
    GREEDY,
    CachedPrefix,
    Completion,
    Event,
    Explanation,
    Finished,
    Message,
    ModelInfo,
    Options,
    Prompt,
    Started,
    Status,
    TokenLogprobs,
)

T = TypeVar("T")


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jitney-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it to its end; an interrupt of the caller (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends what still runs, the loop and the thread."""
        self.run(_end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


class Answer:
    """`AsyncAnswer` as a plain iterator."""

    def __init__(self, loop: LoopThread, answer: AsyncAnswer) -> None:
        self._loop = loop
        self._answer = answer
        self.request_id = answer.request_id

    @property
    def started(self) -> Started | None:
        """The first event, once it has come."""
        return self._answer.started

    @property
    def finished(self) -> Finished | None:
        """The last event, once it has come."""
        return self._answer.finished

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What was generated so far; of several choices, of the first. All are in `result()`."""
        return self._answer.token_ids

    @property
    def text(self) -> str:
        """The text so far; of several choices, that of the first."""
        return self._answer.text

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One a token, if asked for."""
        return self._answer.logprobs

    @property
    def resumed(self) -> int:
        """How often a broken stream was taken up again."""
        return self._answer.resumed

    @property
    def not_identical(self) -> bool:
        """An executor of another fingerprint computed a part."""
        return self._answer.not_identical

    def __iter__(self) -> Iterator[Event]:
        return self._drain(self._answer)

    def texts(self) -> Iterator[str]:
        """Only the text, piece by piece; of several choices, that of the first."""
        return self._drain(self._answer.texts())

    def result(self) -> Completion:
        """Reads to the end and returns the whole answer."""
        return self._loop.run(self._answer.result())

    def abort(self) -> None:
        """Asks the executor to end the answer."""
        self._loop.run(self._answer.abort())

    def close(self) -> None:
        """Stops reading; an answer that has not ended is cancelled."""
        self._loop.run(self._answer.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self, source: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                item = self._loop.run(_next(source))
            except StopAsyncIteration:
                return
            yield item


async def _next(source: AsyncIterator[T]) -> T:
    return await anext(source)


class Chat:
    """`AsyncChat`, blocking."""

    def __init__(self, loop: LoopThread, chat: AsyncChat) -> None:
        self._loop = loop
        self._chat = chat

    @property
    def messages(self) -> list[Message]:
        """All that was said."""
        return self._chat.messages

    def send(self, text: str, options: Options | None = None) -> Answer:
        """The answer to `text`, as a stream of events."""
        return Answer(self._loop, self._chat.send(text, options))

    def ask(self, text: str, options: Options | None = None) -> Completion:
        """The whole answer to `text`."""
        return self._loop.run(self._chat.ask(text, options))


class Client:
    """`AsyncClient`, blocking; from any number of threads."""

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        retry: RetryPolicy | None = None,
        tls_ca: Path | None = None,
    ) -> None:
        self._client = AsyncClient(target, retry=retry, tls_ca=tls_ca)
        self._loop = LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; running answers are cancelled."""
        self._loop.run(self._client.aclose())
        self._loop.close()

    def generate(self, prompt: Prompt, options: Options = GREEDY, *, request_id: str = "") -> Answer:
        """An answer as a stream of events."""
        return Answer(self._loop, self._client.generate(prompt, options, request_id=request_id))

    def generate_once(self, prompt: Prompt, options: Options = GREEDY, *, request_id: str = "") -> Completion:
        """An answer in one message."""
        return self._loop.run(self._client.generate_once(prompt, options, request_id=request_id))

    def chat(self, system: str = "", options: Options = GREEDY, history: Sequence[Message] = ()) -> Chat:
        """A conversation."""
        return Chat(self._loop, self._client.chat(system, options, history))

    def abort(self, request_id: str) -> None:
        """Ends a live request."""
        self._loop.run(self._client.abort(request_id))

    def model_info(self) -> ModelInfo:
        """The model that is served."""
        return self._loop.run(self._client.model_info())

    def status(self, history_steps: int = 0) -> Status:
        """What runs and what waits."""
        return self._loop.run(self._client.status(history_steps))

    def set_policy(self, name: str, parameters: Mapping[str, int] | None = None) -> int:
        """Changes the policy; returns the first step that it decides."""
        return self._loop.run(self._client.set_policy(name, parameters))

    def explain(self, request_id: str) -> Explanation:
        """Why a live request is where it is."""
        return self._loop.run(self._client.explain(request_id))

    def explain_cache(self, prompt: Prompt, salt: str = "") -> CachedPrefix:
        """How much of a prompt is cached, and where it leaves the cached prefix."""
        return self._loop.run(self._client.explain_cache(prompt, salt))
