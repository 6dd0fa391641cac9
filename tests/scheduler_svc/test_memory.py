"""The sections of a policy memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitney.errors import InvalidRequest
from jitney.snapshot import MAX_POLICY_MEMORY_BYTES, PolicyMemory
from scheduler_svc.memory import VERSION, Memory


def test_a_section_comes_back_to_the_version_that_wrote_it() -> None:
    memory = Memory()
    memory.put("fair", 2, b"abc")
    memory.put("lengths", 1, b"")
    written = memory.write("fair")
    assert written.policy == "fair" and written.version == VERSION
    again = Memory.read(written)
    assert again.get("fair", 2) == b"abc" and again.get("fair", 1) == b"" == again.get("lengths", 1)
    again.put("fair", 2, b"")
    assert again.write("fair") == PolicyMemory()


def test_what_nobody_reads_is_carried_on() -> None:
    memory = Memory()
    for name in ("mlfq", "fair"):
        memory.put(name, 1, name.encode())
    written = memory.write("fair")
    assert Memory.read(written).write("fcfs").content == written.content


@given(st.binary(max_size=64), st.integers(0, 3))
def test_whatever_the_bytes_a_memory_is_read(content: bytes, version: int) -> None:
    memory = Memory.read(PolicyMemory("x", version, content))
    assert not memory.lost or memory.write("x") == PolicyMemory()
    memory.write("x")


def test_too_much_is_refused_by_name() -> None:
    memory = Memory()
    memory.put("own", 1, bytes(MAX_POLICY_MEMORY_BYTES))
    with pytest.raises(InvalidRequest, match="policy own wants to remember 65546 bytes"):
        memory.write("own")
