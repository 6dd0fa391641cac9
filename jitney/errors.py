"""The tree of errors that a caller may see. `jitney.serving.status` maps it to gRPC status codes.

JitneyError
 +- InvalidRequest      INVALID_ARGUMENT: a field is wrong; never try again as it is
 +- TooLarge            RESOURCE_EXHAUSTED: a message, queue or quota is full; `retry_after_us` may say when
 +- Missing             NOT_FOUND
 +- Duplicate           ALREADY_EXISTS
 +- Conflict            FAILED_PRECONDITION: fenced, another model, an unknown table
 +- Aborted             ABORTED: ended by another call
 +- Expired             DEADLINE_EXCEEDED
 +- Away                UNAVAILABLE: draining, or a service that is needed does not answer
"""

from __future__ import annotations


class JitneyError(Exception):
    """What was wrong, with the field, the limit and the value where there are such."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        limit: object = "",
        value: object = "",
        retry_after_us: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.limit = str(limit)
        self.value = str(value)
        self.retry_after_us = retry_after_us


class InvalidRequest(JitneyError):
    """A field is wrong."""


class TooLarge(JitneyError):
    """A limit of size, room or queue is reached."""


class Missing(JitneyError):
    """There is no such thing."""


class Duplicate(JitneyError):
    """There is one already."""


class Conflict(JitneyError):
    """The state of the service does not allow it."""


class Aborted(JitneyError):
    """Ended by another call."""


class Expired(JitneyError):
    """A deadline passed."""


class Away(JitneyError):
    """Cannot be served now."""
