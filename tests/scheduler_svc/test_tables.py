"""Learned tables travel by digest: what a replica lacks it is sent, and what is not what it says is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jitney.errors import Conflict, InvalidRequest
from jitney.scheduler_codec import decode_snapshot, digest_of, encode_snapshot, with_tables
from jitney.snapshot import PolicyChoice, PolicyTable, Snapshot
from scheduler_svc import tables as limits
from scheduler_svc.tables import Tables


def naming(*contents: bytes, inline: bool) -> Snapshot:
    """A snapshot with tables of such contents."""
    found = tuple(
        PolicyTable(f"t{n}", digest_of(content), content if inline else b"") for n, content in enumerate(contents)
    )
    return Snapshot(policy=PolicyChoice("sjf", tables=found))


def contents(snapshot: Snapshot) -> list[bytes]:
    return [table.content for table in snapshot.policy.tables]


def test_named_once_sent_it_is_held() -> None:
    tables = Tables()
    with pytest.raises(Conflict, match="is not held here") as error:
        tables.fill(naming(b"one", inline=False))
    assert error.value.field == "policy.tables.t0"
    assert contents(tables.fill(naming(b"one", b"two", inline=True))) == [b"one", b"two"]
    assert contents(tables.fill(naming(b"two", b"one", inline=False))) == [b"two", b"one"]
    assert tables.fill(Snapshot()) == Snapshot()


def test_wrong_digest_and_size() -> None:
    tables = Tables()
    wrong = naming(b"one", inline=True)
    wrong = replace(wrong, policy=replace(wrong.policy, tables=(PolicyTable("t0", b"0" * 16, b"one"),)))
    for snapshot in (wrong, naming(bytes(limits.MAX_TABLE_BYTES + 1), inline=True)):
        with pytest.raises(InvalidRequest) as error:
            tables.fill(snapshot)
        assert error.value.field == "policy.tables.t0" and error.value.limit and error.value.value


def test_the_longest_unnamed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HELD_BYTES", 10)
    tables = Tables()
    for content in (b"aaaa", b"bbbb"):
        tables.fill(naming(content, inline=True))
    tables.fill(naming(b"aaaa", inline=False))
    tables.fill(naming(b"cccc", inline=True))
    tables.fill(naming(b"aaaa", inline=False))
    with pytest.raises(Conflict):
        tables.fill(naming(b"bbbb", inline=False))


def test_put_into_the_bytes_and_taken_out_again() -> None:
    named, inline = (encode_snapshot(naming(b"one", b"two", inline=inline)) for inline in (False, True))
    assert with_tables(named, {digest_of(b"one"): b"one", digest_of(b"two"): b"two"}) == inline
    assert with_tables(inline, {}) == named
    assert contents(decode_snapshot(named)) == [b"", b""]
