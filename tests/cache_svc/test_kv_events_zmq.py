"""KV events over ZeroMQ: who comes late or loses something catches up; the service publishes what it has."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from cache_svc.config import CacheConfig
from cache_svc.kv_events import Feed
from cache_svc.kv_events_publisher import END, EventPublisher
from cache_svc.server import published
from jitney.block_ops import Release, RequestId
from jitney.cache.v1 import cache_pb2 as pb
from jitney.errors import Away, InvalidRequest
from tests.support.cache_caller import Client
from tests.support.kv_mirror import Mirror
from tests.support.kv_rig import WatchedRig, truth
from tests.support.ledger_rig import BLOCK_TOKENS, boarding, prompt
from tests.support.ports import free_ports
from tests.support.processes import service


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


def over_zmq(work: Callable[[Feed, EventPublisher, Subscriber], Awaitable[None]], kept: int = 100) -> None:
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

    over_zmq(work)


def test_what_was_lost_is_sent_again_from_its_number_on() -> None:
    async def work(feed: Feed, publisher: EventPublisher, subscriber: Subscriber) -> None:
        rig = WatchedRig(feed, "a", 8)
        for request in range(1, 5):
            rig.cache(request, prompt(request))
            publisher.flush()
        assert [number for number, _ in await subscriber.ask(3)] == [3, 4]
        assert await subscriber.ask(5) == [], "nothing is missing"

    over_zmq(work)


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

    over_zmq(work, kept=2)


def test_a_malformed_question_harms_nobody() -> None:
    async def work(feed: Feed, publisher: EventPublisher, subscriber: Subscriber) -> None:
        await subscriber.dealer.send_multipart((b"", b"123"))
        await subscriber.dealer.send(b"x")
        [(number, payload)] = await subscriber.ask(0)
        assert number == 0
        subscriber.mirror.follow(payload)
        assert not subscriber.mirror.known

    over_zmq(work)


def test_an_address_that_is_taken() -> None:
    async def run() -> None:
        first, second = (EventPublisher(Feed(), "", 1, lambda: 0.0) for _ in range(2))
        pub, _ = first.open("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        with pytest.raises(Away, match="cannot be published at tcp"):
            second.open(pub, "tcp://127.0.0.1:0")
        first.close()

    asyncio.run(run())


def test_the_service_publishes_what_it_has(tmp_path: Path) -> None:
    ports = free_ports(2)
    pub, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    flags = (f"--kv-events={pub}", f"--kv-events-replay={replay}", "--kv-events-topic=kv", "--cpu-bytes=0")
    one, other = prompt(0, 0), prompt(1)

    async def replayed() -> Mirror:
        subscriber = Subscriber(pub, replay, "kv")
        try:
            async with asyncio.timeout(30):
                for _, payload in await subscriber.ask(0):
                    subscriber.mirror.follow(payload)
        finally:
            subscriber.close()
        return subscriber.mirror

    with service("cache_svc", *flags, folder=tmp_path) as process:
        client = Client(process.target, "e")
        client.open()
        for number, wanted in ((1, one), (2, other)):
            new = client.apply(**boarding((number, wanted, 0))).reserves[0].blocks
            client.apply(seals=[wanted.seal(number, new)], releases=[Release(RequestId(number))])
        known = asyncio.run(replayed()).known
        assert {where: set(blocks) for where, blocks in known.items()} == {(0, "GPU"): {*one.keys, *other.keys}}
        assert known[0, "GPU"][one.keys[1]] == (one.keys[0], tuple(one.tokens[BLOCK_TOKENS:].tolist()))
        client.call(client.stub.Invalidate, pb.InvalidateRequest(prefix_key=one.keys[1]))
        assert set(asyncio.run(replayed()).known[0, "GPU"]) == {one.keys[0], *other.keys}
        client.incarnation = 2
        client.break_stream()
        client.open()
        assert not asyncio.run(replayed()).nonempty
        client.close()


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "cache_svc.kv_events_publisher")
    with pytest.raises(InvalidRequest, match=r"--kv-events needs zmq: pip install 'jitney\[events\]'"):
        published(Feed(), CacheConfig(kv_events="tcp://127.0.0.1:0", kv_events_replay="tcp://127.0.0.1:0"))
