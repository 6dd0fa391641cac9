"""Errors on the wire: the only place that maps JitneyError to gRPC status codes, and back.

A status carries google.rpc.ErrorInfo (domain "jitney", the reason below, metadata field, limit and value) and, where
trying again makes sense, google.rpc.RetryInfo.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, Final, NoReturn, Protocol

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jitney import errors
from jitney.errors import JitneyError

DOMAIN: Final = "jitney"
DETAILS_KEY: Final = "grpc-status-details-bin"

CODES: Final[dict[type[JitneyError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Missing: grpc.StatusCode.NOT_FOUND,
    errors.Duplicate: grpc.StatusCode.ALREADY_EXISTS,
    errors.Conflict: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.Expired: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Away: grpc.StatusCode.UNAVAILABLE,
    JitneyError: grpc.StatusCode.INTERNAL,
}
REASONS: Final[dict[type[JitneyError], str]] = {
    errors.InvalidRequest: "INVALID_REQUEST",
    errors.TooLarge: "TOO_LARGE",
    errors.Missing: "MISSING",
    errors.Duplicate: "DUPLICATE",
    errors.Conflict: "CONFLICT",
    errors.Aborted: "ABORTED",
    errors.Expired: "EXPIRED",
    errors.Away: "AWAY",
    JitneyError: "INTERNAL",
}
_BY_REASON: Final = {reason: kind for kind, reason in REASONS.items()}
_BY_CODE: Final = {code: kind for kind, code in CODES.items()} | {grpc.StatusCode.CANCELLED: errors.Aborted}
_MAX_TEXT: Final = 1024  # A status travels in HTTP/2 headers, which peers bound at 8 KiB.
_OVER_LIMIT = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)", re.IGNORECASE)


class _Aborting(Protocol):
    """A servicer's context, as far as it is used here."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """Ends the call."""


def kind_of(error: JitneyError) -> type[JitneyError]:
    """The class of the tree that decides the code: the nearest one that has an entry."""
    return next(kind for kind in type(error).__mro__ if kind in CODES)


def to_proto(error: JitneyError) -> status_pb2.Status:
    """The error as google.rpc.Status with its details."""
    kind = kind_of(error)
    info = error_details_pb2.ErrorInfo(reason=REASONS[kind], domain=DOMAIN)
    for name in ("field", "limit", "value"):
        if text := getattr(error, name):
            info.metadata[name] = text[:_MAX_TEXT]
    status = status_pb2.Status(code=CODES[kind].value[0], message=error.message[:_MAX_TEXT])
    status.details.append(_packed(info))
    if error.retry_after_us > 0:
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(error.retry_after_us)
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def to_status(error: JitneyError) -> grpc.Status:
    """The error as a gRPC status, details in its trailing metadata."""
    return rpc_status.to_status(to_proto(error))


async def abort(context: _Aborting, error: JitneyError) -> NoReturn:
    """Ends a call of a grpc.aio servicer with the error. Never returns."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)


def from_rpc_error(error: grpc.RpcError) -> JitneyError:
    """The error that a service sent, or what is known of a call that broke. Of sync and async calls alike."""
    code, message, metadata = _parts(error)
    for key, value in metadata:
        if key == DETAILS_KEY:
            parsed = None
            with contextlib.suppress(DecodeError):
                parsed = _from_details(bytes(value), code)
            if parsed is not None:
                return parsed
    if over := _OVER_LIMIT.search(message):
        value, limit = over.groups()
        text = f"message of {value} bytes, the limit is {limit}"
        return errors.TooLarge(text, field="message", limit=limit, value=value)
    kind = _BY_CODE.get(code, JitneyError)
    return kind(message or code.name.lower().replace("_", " "))


def _packed(detail: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _parts(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, list[tuple[str, Any]]]:
    call: Any = error
    code = call.code() if callable(getattr(call, "code", None)) else None
    details = call.details() if callable(getattr(call, "details", None)) else None
    trailing = call.trailing_metadata() if callable(getattr(call, "trailing_metadata", None)) else None
    pairs = [(str(key), value) for key, value in (trailing or ())]
    return code or grpc.StatusCode.UNKNOWN, details or str(error), pairs


def _from_details(data: bytes, code: grpc.StatusCode) -> JitneyError | None:
    """None where the details are not ours."""
    status = status_pb2.Status.FromString(data)
    info, retry_after_us = None, 0
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_us = retry.retry_delay.ToMicroseconds()
    if info is None or info.domain != DOMAIN:
        return None
    kind = _BY_REASON.get(info.reason) or _BY_CODE.get(code, JitneyError)
    return kind(
        status.message,
        field=info.metadata.get("field", ""),
        limit=info.metadata.get("limit", ""),
        value=info.metadata.get("value", ""),
        retry_after_us=retry_after_us,
    )
