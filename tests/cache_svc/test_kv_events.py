"""Whoever follows the events knows at any time just what the cache's indexes have, from the start or come late."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_svc.epochs import DevicePool, Session
from cache_svc.index import Content, Origin
from cache_svc.invalidate import What, invalidate
from cache_svc.kv_events import ROOTS_KEPT, Cleared, Feed, Journal, Medium, Removed, Roots, Stored, WatchedIndex
from cache_svc.kv_events_wire import encode
from cache_svc.tiers import TierLimits
from jitney.block_ops import BlockState, DeclaredBlock, RequestId, Tier, handle
from jitney.keys import Key, Root, salt_digest
from tests.support.kv_mirror import Mirror
from tests.support.kv_rig import WatchedRig, WatchedTierRig, follow, truth
from tests.support.ledger_rig import BLOCK_TOKENS, OK, prompt

FINGERPRINT = b"fp"
FAMILY = ((0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (1,), (1, 0, 0))


def test_roots_of_any_number_of_salts_take_no_more_room() -> None:
    roots = Roots()
    roots.learn(FINGERPRINT)
    for number in range(ROOTS_KEPT + 10):
        origin = Origin("t", salt_digest(str(number)), "m")
        assert roots.is_root(Root(str(number), "m", "", FINGERPRINT).key(), origin)
        assert len(roots.known) <= ROOTS_KEPT
    assert not roots.is_root(Root("", "m", "", FINGERPRINT).key(), origin)


OPERATION = st.tuples(
    st.sampled_from(["cache", "release", "forget", "reopen"]),
    st.sampled_from(["a", "b"]),
    st.integers(1, 5),
    st.sampled_from(FAMILY),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATION, max_size=40), st.integers(1, 3))
def test_who_follows_from_the_start_or_joins_late_knows_what_the_cache_has(
    operations: list[tuple[str, str, int, tuple[int, ...]]], part: int
) -> None:
    feed, early = Feed(), Mirror()
    rigs = {name: WatchedRig(feed, name, 5) for name in ("a", "b")}
    for kind, name, request, path in operations:
        rig = rigs[name]
        match kind:
            case "cache":
                rig.release(request)
                answer = rig.board(request, prompt(*path))
                new = answer.reserves[0].blocks
                if new:
                    rig.apply(seals=[prompt(*path).seal(request, new, len(answer.acquires[0].blocks))])
            case "release":
                rig.release(request)
            case "forget":
                invalidate([rig.ledger], (), What(prefix_key=prompt(*path).keys[0]))
            case _:
                rigs[name] = WatchedRig(feed, name, 5)
        follow(early, feed.take())
        assert early.nonempty == truth(feed)
    late = Mirror()
    follow(late, feed.snapshot(part))
    assert late.nonempty == truth(feed)
    assert feed.take() == []


TIER_OPERATION = st.tuples(
    st.sampled_from(["cache", "cache", "load", "release", "swap", "store", "work", "fail", "evict", "forget"]),
    st.sampled_from([0, 1]),
    st.integers(1, 4),
    st.sampled_from(FAMILY),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TIER_OPERATION, max_size=40))
def test_lower_tiers_too(operations: list[tuple[str, int, int, tuple[int, ...]]]) -> None:
    feed, early, late = Feed(), Mirror(), Mirror()
    rig = WatchedTierRig(feed, TierLimits(cpu_slots=6, ssd_slots=8, interval_blocks=1))
    devices = [rig.watched(6, name) for name in ("a", "b")]
    for kind, which, request, path in operations:
        device, wanted = devices[which], prompt(*path)
        match kind:
            case "cache" | "load":
                device.release(request)
                reserved = device.board(request, wanted, load=9 if kind == "load" else 0)
                loaded = device.load(reserved.ticket) if reserved.ticket and reserved.ticket in device.loads else 0
                if reserved.ticket and not loaded:
                    device.abort(reserved.ticket)
                if reserved.code is OK and reserved.blocks and not device.answer.acquires[0].joined:
                    device.compute(request, wanted, reserved.blocks, len(wanted.keys) - len(reserved.blocks))
            case "release":
                device.release(request)
            case "swap":
                device.swap(request, Tier.SSD if path[0] else Tier.CPU)
            case "store":
                device.store()
            case "work" | "fail":
                rig.work(ok=kind == "work")
            case "evict":
                device.evict_all()
            case _:
                invalidate([each.ledger for each in devices], [rig.tiers], What(prefix_key=wanted.keys[0]))
                rig.settle()
        follow(early, feed.take())
        assert early.nonempty == truth(feed)
    follow(late, feed.snapshot(2))
    assert late.nonempty == early.nonempty


def test_a_declaration_is_told() -> None:
    feed, mirror = Feed(), Mirror()
    pool = DevicePool("a", 1, b"", 8, 1, BLOCK_TOKENS)
    session = Session(pool, 1, redeclares=True, index_of=feed.device)
    wanted = prompt(0, 1)
    origin = ("default", salt_digest(""), "model")
    tokens = wanted.tokens.astype("<i4").tobytes()
    session.redeclare(
        [
            DeclaredBlock(
                handle(at, 1),
                BlockState.SEALED,
                key,
                wanted.keys[at - 1] if at else wanted.root,
                tokens[at * 16 : (at + 1) * 16],
                *origin,
                [RequestId(1)],
            )
            for at, key in enumerate(wanted.keys)
        ]
    )
    follow(mirror, feed.take())
    assert mirror.nonempty == truth(feed) != {}
    Session(pool, 2, redeclares=False, index_of=feed.device)
    follow(mirror, feed.take())
    assert mirror.nonempty == {}, "an executor that opens anew has nothing"


def test_a_chain_that_is_sealed_in_one_go_is_one_event() -> None:
    feed = Feed()
    rig = WatchedRig(feed, "a", 8)
    wanted = prompt(0, 0, 1)
    rig.cache(1, wanted)
    [(rank, [event])] = feed.take()
    assert rank == 0 and isinstance(event, Stored)
    assert (event.medium, event.keys, event.parent) == (Medium.DEVICE, wanted.keys, None)
    assert event.token_ids == wanted.tokens.astype("<i4").tobytes()
    rig.release(1)
    rig.cache(2, prompt(1, 1, 1, 1, 1, 1, 1, 1))
    [(_, [removed, stored])] = feed.take()
    assert isinstance(removed, Removed) and isinstance(stored, Stored)
    assert sorted(removed.keys) == sorted(wanted.keys), "evicted for the other"


def test_the_tiers_have_no_rank_and_a_salt_is_told_by_its_digest() -> None:
    feed = Feed()
    index = feed.tier(Medium.SSD, 4)
    feed.roots.learn(FINGERPRINT)
    origin = Origin("default", salt_digest("mine"), "model")
    root = Root("mine", "model", "", FINGERPRINT).key()
    index.add(2, Key(b"k" * 32), root, Content(np.arange(2, dtype="<i4").tobytes(), origin))
    [(rank, events)] = feed.take()
    assert rank is None
    mirror = Mirror()
    mirror.follow(encode(1.0, events, rank))
    assert mirror.known == {(None, "STORAGE"): {b"k" * 32: (None, (0, 1))}}
    [_, [stored], _] = msgspec.msgpack.decode(encode(1.0, events, rank))
    assert stored["extra_keys"] == [[salt_digest("mine").hex()]]


def test_events_merge_only_where_they_belong_together() -> None:
    journal, index = Journal(Roots()), WatchedIndex(4, Journal(Roots()), Medium.CPU)
    index.journal = journal
    one, other = Origin("a", salt_digest(""), "m"), Origin("b", salt_digest(""), "m")
    keys = [Key(bytes([number]) * 32) for number in range(4)]
    for at, origin in enumerate((one, one, other)):
        index.add(at, keys[at + 1], keys[at], Content(b"\0" * 8, origin))
    assert [len(event.keys) for event in journal.events if isinstance(event, Stored)] == [2, 1]
    index.remove([2])
    index.remove([1, 0])
    events: Any = journal.take()
    assert events[-1] == Removed(Medium.CPU, [keys[3], keys[2], keys[1]])
    assert encode(0.0, [Cleared()], 3)
