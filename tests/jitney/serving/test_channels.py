"""Targets of channels."""

from __future__ import annotations

import asyncio

import pytest

from jitney.errors import Away, InvalidRequest
from jitney.serving import channels


@pytest.mark.parametrize(
    ("targets", "uri"),
    [
        ("localhost:50051", "dns:///localhost:50051"),
        ("unix:/run/jitney.sock", "unix:/run/jitney.sock"),
        ("dns:///scheduler:50052", "dns:///scheduler:50052"),
        ("127.0.0.1:1,127.0.0.1:2", "ipv4:127.0.0.1:1,127.0.0.1:2"),
        (["localhost:1", "10.0.0.1:2"], "ipv4:127.0.0.1:1,10.0.0.1:2"),
        ("[::1]:1, [::1]:2", "ipv6:[::1]:1,[::1]:2"),
    ],
)
def test_target_uri(targets: str | list[str], uri: str) -> None:
    assert channels.target_uri(targets) == uri


@pytest.mark.parametrize("targets", ["", " , ", "a:1,b:2", "127.0.0.1:1,[::1]:2", "127.0.0.1,127.0.0.1:2"])
def test_wrong_targets_are_refused(targets: str) -> None:
    with pytest.raises(InvalidRequest):
        channels.target_uri(targets)


def test_nobody_there() -> None:
    assert asyncio.run(channels.health("127.0.0.1:1")) == "UNREACHABLE"
    with pytest.raises(Away, match="UNREACHABLE"):
        asyncio.run(channels.wait_healthy("127.0.0.1:1", 0.2))
