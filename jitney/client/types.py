"""What callers of the client library hand in and get back: plain values, no protobuf.

Token ids are ints below the vocabulary. Times carry their unit in the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

Role = Literal["system", "user", "assistant"]


class FinishReason(IntEnum):
    """Why an answer ended; the numbers of the proto."""

    UNSPECIFIED = 0
    STOP = 1  # end of sequence, a stop token or a stop string
    LENGTH = 2  # max_tokens
    ABORTED = 3
    DEADLINE = 4
    REFUSED = 5
    ERROR = 6

    @property
    def whole(self) -> bool:
        """The answer ended by itself or at the length that was asked for."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. `token_ids` of an assistant's message are the ids that were generated for it."""

    role: Role
    content: str
    token_ids: Sequence[int] = ()


Prompt = str | Sequence[int] | Sequence[Message]
"""Text as it is, token ids, or a chat that goes through the model's own template."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to answer. None and empty values mean the executor's default; ranges stand in the executor's proto."""

    max_tokens: int | None = None  # None: what fits into context and pool
    temperature: float = 0.0  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None  # None: the executor draws one
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # top k for each token
    n: int = 1  # how many answers
    priority: int = 0  # larger is more urgent
    tenant: str = ""
    endpoint: str = ""
    salt: str = ""
    ttft_deadline_ms: int | None = None  # from arrival
    deadline_ms: int | None = None  # from arrival
    return_prompt_token_ids: bool = False


GREEDY = Options()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a generated token, and the most likely ones."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The executor has taken the request."""

    request_id: str
    seed: int
    prompt_tokens: int
    max_tokens: int
    model_version: str
    fingerprint: bytes
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and new text. Text may lag behind the tokens: it is held back until it is certain."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for
    choice: int = 0  # which of the answers goes on


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """One of several answers has ended."""

    choice: int
    reason: FinishReason
    generated_tokens: int
    stop_matched: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What the request used, as the executor that ended it counted: the prompt once, tokens of all answers."""

    prompt_tokens: int = 0
    cached_device_tokens: int = 0
    cached_cpu_tokens: int = 0
    cached_ssd_tokens: int = 0
    generated_tokens: int = 0
    billable_tokens: int = 0  # prompt and generated; a cached one counts a fraction, the sum is rounded up
    billable_microtokens: int = 0
    preemptions: int = 0
    computed_prompt_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that no tier had to compute again."""
        return self.cached_device_tokens + self.cached_cpu_tokens + self.cached_ssd_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Times as the executor that ended the request saw them."""

    queue_us: int = 0
    ttft_us: int = 0
    total_us: int = 0
    tpot_us: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. Of several answers the reason is `whole` only if all ended so."""

    reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    stop_matched: str = ""
    stop_token_id: int | None = None


Event = Started | Delta | ChoiceEnd | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer of several."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    reason: FinishReason
    stop_matched: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; of several, `choices` has all, and what stands here by itself is of the first."""

    started: Started
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished
    choices: tuple[Choice, ...]
    resumed: int = 0  # how often its stream broke and was taken up again
    not_identical: bool = False  # another fingerprint computed a part of it


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that an executor serves."""

    name: str
    version: str
    fingerprint: bytes
    fingerprint_text: str
    context_tokens: int
    vocabulary: int
    block_tokens: int
    pool_blocks: int
    block_bytes: int
    backend: str
    arithmetic: str
    bit_invariant: bool
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    row_multiple: int
    max_request_bytes: int


@dataclass(frozen=True, slots=True)
class Policy:
    """Which policy decides, and its parameters."""

    name: str
    parameters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of the device pool."""

    total: int = 0
    free: int = 0
    evictable: int = 0
    leaving: int = 0
    granted: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the executor."""

    step: int
    at_us: int
    rows: int
    tokens: int
    prefill_tokens: int
    step_us: int
    decide_us: int  # 0: coasted
    waiting: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class Status:
    """What runs, what waits and why."""

    executor: str
    incarnation: int
    step: int
    num_running: int
    num_waiting: int
    blocks: BlockCounts
    scheduler_connected: bool
    cache_connected: bool
    decisions: int
    coasted_steps: int
    preemptions: int
    finished: Mapping[FinishReason, int]
    refused: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    waiting_reasons: Mapping[str, int]
    history: tuple[StepRecord, ...]  # oldest first
    policy: Policy
    not_ready: str  # empty: ready
    scheduler_build: str
    cache_reopenings: int
    decide_us_p50: int
    decide_us_p99: int
    backend: str  # of attention


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """How much of a prompt is cached. Tokens stand one behind the other, from its start on, in whole blocks."""

    prompt_tokens: int
    block_tokens: int
    device_tokens: int
    cpu_tokens: int
    ssd_tokens: int
    pending_tokens: int  # behind those on the device: another request computes them now
    hit_tokens: int  # what a request would be spared at most
    sentence: str
    prefix_key: bytes  # of its last whole block, cached or not; empty: it has none
    model_version: str
    keys: tuple[bytes, ...]  # of its root and, behind it, of each whole block, cached or not

    @property
    def cached_tokens(self) -> int:
        """Where the prompt leaves the cached prefix."""
        return self.device_tokens + self.cpu_tokens + self.ssd_tokens

    @property
    def cached_key(self) -> bytes:
        """Of the last block that is cached; empty: none is."""
        blocks = self.cached_tokens // self.block_tokens
        return self.keys[blocks] if blocks else b""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one live request is where it is."""

    state: str
    reason: str  # of a waiting one, e.g. "blocks"
    sentence: str
    needed: int
    available: int
    ahead: int
    history: tuple[str, ...]  # oldest first
