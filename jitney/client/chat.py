"""A conversation: each turn sends all that was said, with the ids that were generated for the assistant's part.

Text of an answer, tokenised again, may give other ids than those that were generated; with the ids themselves the
next turn's prompt begins with exactly the tokens that the executor has cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jitney.client.answer import AsyncAnswer, OnFinished
from jitney.client.types import Completion, Message, Options, Prompt
from jitney.errors import InvalidRequest

Generate = Callable[[Prompt, Options, OnFinished], AsyncAnswer]


class AsyncChat:
    """Messages so far, and `send` for the next turn. One turn at a time.

    A turn that did not come to its own end (stop, or length) leaves no trace, so that it can be sent again.
    """

    def __init__(self, generate: Generate, system: str, options: Options, history: Sequence[Message]) -> None:
        self._generate = generate
        self.options = options
        self.messages: list[Message] = [Message("system", system)] if system else []
        self.messages.extend(history)

    def send(self, text: str, options: Options | None = None) -> AsyncAnswer:
        """The answer to `text`, as a stream of events. InvalidRequest for several: a turn has one."""
        asked, options = Message("user", text), options or self.options
        if options.n > 1:
            raise InvalidRequest(
                f"a turn of a chat has one answer, not n = {options.n}", field="n", limit=1, value=options.n
            )

        def keep(answer: AsyncAnswer) -> None:
            if answer.finished is not None and answer.finished.reason.whole:
                self.messages += [asked, Message("assistant", answer.text, answer.token_ids)]

        return self._generate([*self.messages, asked], options, keep)

    async def ask(self, text: str, options: Options | None = None) -> Completion:
        """The whole answer to `text`."""
        return await self.send(text, options).result()
