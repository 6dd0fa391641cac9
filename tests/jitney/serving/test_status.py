"""Errors survive the wire."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from jitney import errors
from jitney.errors import JitneyError
from jitney.serving import status

KINDS = [kind for kind in status.CODES if kind is not JitneyError]


class Broken(grpc.RpcError):
    """A call as its client sees it."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        super().__init__()
        self._all = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._all[0]

    def details(self) -> str:
        return self._all[1]

    def trailing_metadata(self) -> Any:
        return self._all[2]


def over_the_wire(error: JitneyError) -> JitneyError:
    sent = status.to_status(error)
    metadata = tuple((key, value) for key, value in sent.trailing_metadata or ())
    return status.from_rpc_error(Broken(sent.code, sent.details or "", metadata))


@pytest.mark.parametrize("kind", [*KINDS, JitneyError])
def test_round_trip(kind: type[JitneyError]) -> None:
    sent = kind("n is 3, at most 2", field="n", limit=2, value=3, retry_after_us=1_234_567)
    got = over_the_wire(sent)
    assert type(got) is kind
    assert vars(got) == vars(sent)


def test_every_error_of_the_tree_has_a_code_of_its_own() -> None:
    leaves = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, JitneyError)}
    assert leaves == set(status.CODES) == set(status.REASONS)
    assert len(set(status.CODES.values())) == len(set(status.REASONS.values())) == len(leaves)


def test_a_subclass_travels_as_the_nearest_class() -> None:
    class Special(errors.InvalidRequest):
        pass

    got = over_the_wire(Special("no", field="x"))
    assert type(got) is errors.InvalidRequest
    assert got.field == "x"


def test_long_texts_are_cut_to_what_headers_take() -> None:
    got = over_the_wire(errors.InvalidRequest("m" * 100_000, field="id", value="v" * 100_000))
    assert len(got.message) == len(got.value) == 1024


def test_foreign_errors_are_mapped_by_code() -> None:
    assert type(status.from_rpc_error(Broken(grpc.StatusCode.UNAVAILABLE, "gone"))) is errors.Away
    assert type(status.from_rpc_error(Broken(grpc.StatusCode.CANCELLED, "client"))) is errors.Aborted
    assert type(status.from_rpc_error(Broken(grpc.StatusCode.UNKNOWN, "?"))) is JitneyError
    assert status.from_rpc_error(Broken(grpc.StatusCode.DEADLINE_EXCEEDED, "")).message
    assert type(status.from_rpc_error(grpc.RpcError("bare"))) is JitneyError


def test_foreign_or_broken_details_are_passed_over() -> None:
    other = status_pb2.Status(code=5, message="x").SerializeToString()
    for data in (other, b"\xff\xff\xff"):
        got = status.from_rpc_error(Broken(grpc.StatusCode.NOT_FOUND, "not here", ((status.DETAILS_KEY, data),)))
        assert type(got) is errors.Missing
        assert got.message == "not here"


def test_a_message_over_the_limit_names_it() -> None:
    text = "SERVER: Received message larger than max (68157445 vs. 67108864)"
    got = status.from_rpc_error(Broken(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
    assert (type(got), got.field, got.limit, got.value) == (errors.TooLarge, "message", "67108864", "68157445")
