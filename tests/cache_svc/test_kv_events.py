"""Whoever follows the events knows at any time just what the cache's indexes have; over ZeroMQ too, however late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_svc.blocks import BlockTable
from cache_svc.index import Content, Origin
from cache_svc.invalidate import What, invalidate
from cache_svc.kv_events import Cleared, Event, Feed, Journal, Medium, Removed, Roots, Stored, WatchedIndex
from cache_svc.kv_events_publisher import END, EventPublisher
from cache_svc.kv_events_wire import encode
from cache_svc.ledger import Ledger
from jitney.errors import Away
from jitney.keys import Key, Root, salt_digest
from tests.support.kv_mirror import Mirror
from tests.support.ledger_rig import BLOCK_TOKENS, Rig, prompt

FINGERPRINT = b"fp"
FAMILY = ((0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (1,), (1, 0, 0))


class WatchedRig(Rig):
    """A rig whose ledger is a device of the feed."""

    def __init__(self, feed: Feed, name: str, blocks: int) -> None:
        super().__init__(blocks)
        self.index = feed.device(name, b"", blocks)
        self.ledger = Ledger(BlockTable(blocks, index=self.index), BLOCK_TOKENS)


def truth(feed: Feed) -> dict[tuple[int | None, str], dict[bytes, tuple[bytes | None, tuple[int, ...]]]]:
    """What the indexes have, in the mirror's words."""
    found = {}
    for (rank, medium), index in feed.indexes.items():
        known: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        for key, at in index.sealed.items():
            content, parent = index.content_of(at), index.parent_key[at]
            assert content is not None and parent is not None
            before = None if feed.roots.is_root(parent, content.origin) else parent
            known[key] = (before, tuple(np.frombuffer(content.token_ids, "<i4").tolist()))
        if known:
            found[rank, medium.value] = known
    return found


def follow(mirror: Mirror, parts: Iterable[tuple[int | None, list[Event]]]) -> None:
    for rank, events in parts:
        mirror.follow(encode(1.0, events, rank))


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


# Over ZeroMQ.


class Subscriber:
    """What a router does: SUB for what happens, DEALER for what it missed."""

    def __init__(self, pub: str, replay: str, topic: str) -> None:
        self.context = zmq.asyncio.Context()
        self.sub, self.dealer = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(pub)
        self.dealer.connect(replay)
        self.mirror = Mirror()
        self.numbers: list[int] = []

    def close(self) -> None:
        self.sub.close(linger=0)
        self.dealer.close(linger=0)
        self.context.term()

    async def ask(self, first: int) -> list[tuple[int, bytes]]:
        """Batches from that number on."""
        await self.dealer.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, bytes]] = []
        while True:
            _, topic, number, payload = await self.dealer.recv_multipart()
            if number == END:
                assert topic == payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))

    async def next(self) -> tuple[int, bytes]:
        """The next batch that is published."""
        _, number, payload = await self.sub.recv_multipart()
        return int.from_bytes(number, "big"), payload


def published(work: Callable[[Feed, EventPublisher, Subscriber], Awaitable[None]], kept: int = 100) -> None:
    async def run() -> None:
        feed = Feed()
        publisher = EventPublisher(feed, "kv@cache", kept, lambda: 1.5)
        pub, replay = publisher.open("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        subscriber = Subscriber(pub, replay, "kv@")
        try:
            async with asyncio.timeout(60):
                await work(feed, publisher, subscriber)
        finally:
            subscriber.close()
            publisher.close()

    asyncio.run(run())


async def heard(feed: Feed, publisher: EventPublisher, subscriber: Subscriber, rig: WatchedRig) -> int:
    """Publishes until the subscription stands; the number of the first batch that came."""
    while True:
        rig.cache(9, prompt(7))
        publisher.flush()
        rig.release(9)
        rig.ledger.blocks.forget(set(rig.index.sealed.values()))
        publisher.flush()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                number, _ = await subscriber.next()
                return number


def test_a_late_subscriber_catches_up_and_goes_on() -> None:
    async def work(feed: Feed, publisher: EventPublisher, subscriber: Subscriber) -> None:
        rig = WatchedRig(feed, "a", 8)
        rig.cache(1, prompt(0, 0))
        publisher.flush()
        await heard(feed, publisher, subscriber, rig)
        caught = await subscriber.ask(0)
        assert [number for number, _ in caught] == list(range(len(caught)))
        for _, payload in caught:
            subscriber.mirror.follow(payload)
        assert subscriber.mirror.nonempty == truth(feed)
        rig.release(1)
        rig.cache(2, prompt(1, 1, 1, 1, 1, 1, 1))
        publisher.flush()
        last = caught[-1][0]
        while subscriber.mirror.nonempty != truth(feed):
            number, payload = await subscriber.next()
            if number > last:
                assert number == last + 1, "without gaps"
                subscriber.mirror.follow(payload)
                last = number

    published(work)


def test_what_was_lost_is_sent_again_from_its_number_on() -> None:
    async def work(feed: Feed, publisher: EventPublisher, subscriber: Subscriber) -> None:
        rig = WatchedRig(feed, "a", 8)
        for request in range(1, 5):
            rig.cache(request, prompt(request))
            publisher.flush()
        assert [number for number, _ in await subscriber.ask(3)] == [3, 4]
        assert await subscriber.ask(5) == [], "nothing is missing"

    published(work)


@pytest.mark.parametrize("first", [0, 77], ids=["kept no more", "of an earlier cache"])
def test_what_is_not_kept_is_told_as_a_snapshot(first: int) -> None:
    async def work(feed: Feed, publisher: EventPublisher, subscriber: Subscriber) -> None:
        rig = WatchedRig(feed, "a", 8)
        for request in range(1, 7):
            rig.cache(request, prompt(request))
            publisher.flush()
        subscriber.mirror.known[0, "GPU"] = {b"of an earlier cache": (None, ())}
        parts = await subscriber.ask(first)
        assert {number for number, _ in parts} == {6}, "as of the last batch"
        for _, payload in parts:
            subscriber.mirror.follow(payload)
        assert subscriber.mirror.nonempty == truth(feed)

    published(work, kept=2)


def test_a_malformed_question_harms_nobody() -> None:
    async def work(feed: Feed, publisher: EventPublisher, subscriber: Subscriber) -> None:
        await subscriber.dealer.send_multipart((b"", b"123"))
        await subscriber.dealer.send(b"x")
        [(number, payload)] = await subscriber.ask(0)
        assert number == 0
        subscriber.mirror.follow(payload)
        assert not subscriber.mirror.known

    published(work)


def test_an_address_that_is_taken() -> None:
    async def run() -> None:
        first, second = (EventPublisher(Feed(), "", 1, lambda: 0.0) for _ in range(2))
        pub, _ = first.open("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        with pytest.raises(Away, match="cannot be published at tcp"):
            second.open(pub, "tcp://127.0.0.1:0")
        first.close()

    asyncio.run(run())


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
