"""The client library: `AsyncClient` for event loops, `Client` for everything else.

    with Client("127.0.0.1:50051") as client:
        for piece in client.generate("Once upon a time", Options(max_tokens=64)).texts():
            print(piece, end="", flush=True)

An answer whose executor dies is taken up again when it is back (or by another one behind the same target), with the
tokens that were received: the caller sees one uninterrupted answer. Errors are classes of `jitney.errors`.
"""

from jitney.client.aio import DEFAULT_TARGET, AsyncClient
from jitney.client.answer import AsyncAnswer
from jitney.client.chat import AsyncChat
from jitney.client.retry import NO_RETRY, RetryPolicy
from jitney.client.sync import Answer, Chat, Client
from jitney.client.types import (
    GREEDY,
    BlockCounts,
    CachedPrefix,
    Choice,
    ChoiceEnd,
    Completion,
    Delta,
    Event,
    Explanation,
    Finished,
    FinishReason,
    Message,
    ModelInfo,
    Options,
    Policy,
    Prompt,
    Started,
    Status,
    StepRecord,
    Timings,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "DEFAULT_TARGET",
    "GREEDY",
    "NO_RETRY",
    "Answer",
    "AsyncAnswer",
    "AsyncChat",
    "AsyncClient",
    "BlockCounts",
    "CachedPrefix",
    "Chat",
    "Choice",
    "ChoiceEnd",
    "Client",
    "Completion",
    "Delta",
    "Event",
    "Explanation",
    "FinishReason",
    "Finished",
    "Message",
    "ModelInfo",
    "Options",
    "Policy",
    "Prompt",
    "RetryPolicy",
    "Started",
    "Status",
    "StepRecord",
    "Timings",
    "TokenLogprobs",
    "Usage",
]
