"""What a request may ask for at most: all limits of the door in one place."""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.step_plan import MAX_LOGPROBS
from jitney.snapshot import PRIORITY_RANGE


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that hold for every model; those of context, pool and vocabulary come from ModelInfo."""

    request_bytes: int = 64 << 20
    request_id_bytes: int = 128
    name_bytes: int = 64  # of a tenant or an endpoint
    salt_bytes: int = 256
    chat_messages: int = 4096
    stop_strings: int = 16
    stop_string_bytes: int = 256
    stop_token_ids: int = 64
    logprobs: int = MAX_LOGPROBS
    choices: int = 32
    temperature: float = 100.0
    greedy_below: float = 1e-4  # a temperature under it would overflow float32: it is as good as greedy
    priority: tuple[int, int] = PRIORITY_RANGE
    deadline_ms: int = 7 * 24 * 3600 * 1000
    reader_timeout_s: float = 30.0  # a stream whose reader takes nothing for so long is ended
