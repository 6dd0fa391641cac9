"""When a call broke: is it worth another try, when, and until when."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import grpc

from jitney.errors import Away, JitneyError
from jitney.serving.status import DETAILS_KEY, from_rpc_error


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Waits grow from `first_s` to `most_s`, each shortened at random by up to a quarter, until time is up.

    `connect_s` bounds how long a call that has not begun is tried, `resume_s` how long an answer that has begun may
    stand still while its executor is away. 0: do not try again.
    """

    connect_s: float = 10.0
    resume_s: float = 120.0
    first_s: float = 0.05
    most_s: float = 1.0


NO_RETRY = RetryPolicy(connect_s=0.0, resume_s=0.0)


class Patience:
    """The waits of one stretch of failures; made at the first of them, dropped when something came."""

    def __init__(self, policy: RetryPolicy, begun: bool) -> None:
        self._most_s = policy.most_s
        self._wait_s = policy.first_s
        self._end = time.monotonic() + (policy.resume_s if begun else policy.connect_s)

    def next_wait_s(self) -> float | None:
        """How long to wait before the next try; None: give up."""
        wait_s = self._wait_s * random.uniform(0.75, 1.0)
        if time.monotonic() + wait_s > self._end:
            return None
        self._wait_s = min(2 * self._wait_s, self._most_s)
        return wait_s


def as_error(error: grpc.RpcError, target: str, who: str = "executor") -> JitneyError:
    """What the executor (or `who`) said; of a connection that failed, one sentence that names the target."""
    found = from_rpc_error(error)
    if not isinstance(found, Away) or _has_details(error):
        return found
    why = found.message.rsplit(": ", 1)[-1].rstrip(".]")
    return Away(f"no {who} answers at {target} ({why})", field="target", value=target)


def _has_details(error: grpc.RpcError) -> bool:
    call: Any = error
    return any(key == DETAILS_KEY for key, _ in call.trailing_metadata() or ())


def is_lost(error: grpc.RpcError) -> bool:
    """The connection or the executor went away, so that the same call may well succeed elsewhere or later."""
    call: Any = error
    code, details = call.code(), call.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return True
    if _has_details(error):
        return False  # An executor said so, in full health.
    if code is grpc.StatusCode.CANCELLED:
        return True  # Not by this side: an executor that was stopped.
    return (code is grpc.StatusCode.INTERNAL and "RST_STREAM" in details) or (
        code is grpc.StatusCode.UNKNOWN and "Stream removed" in details
    )
