"""The cache as a process, spoken to over gRPC."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jitney.block_ops import BlockState, Chain, DeclaredBlock, Release, RequestId, handle
from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache_codec import decode_answer
from jitney.chain_codec import decode_hits, encode_chains, encode_declared
from jitney.errors import Conflict, InvalidRequest, JitneyError, Missing
from jitney.service_process import ServiceProcess
from jitney.serving.status import from_rpc_error
from jitney.ticket_codec import encode_call
from jitney.ticket_ops import LoadDone, Ticket
from tests.support.cache_caller import Client
from tests.support.ledger_rig import BLOCK_TOKENS, boarding, prompt
from tests.support.processes import service, wait_until

A = RequestId(1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("cache")
    with service("cache_svc", "--audit-idle-s=0.05", folder=folder) as process:
        yield process
    assert not [line for line in (folder / "jitney.log").read_text().splitlines() if '"level": "error"' in line]


@pytest.fixture
def client(cache: ServiceProcess) -> Iterator[Client]:
    made = Client(cache.target)
    yield made
    made.close()


def test_a_request_from_boarding_to_release(client: Client) -> None:
    client.open()
    wanted = prompt(1, 2, 3)
    blocks = client.apply(**boarding((1, wanted, 1))).reserves[0].blocks
    assert len(blocks) == 4
    answer = client.apply(seals=[wanted.seal(1, blocks[:3])], grant=2)
    assert len(answer.granted) == 2
    assert answer.apply_us >= 0
    hits = decode_hits(client.call(client.stub.Lookup, encode_chains("executor-0", [Chain(RequestId(2), wanted.keys)])))
    assert (hits[0].device_blocks, hits[0].unheld_blocks, hits[0].cpu_blocks, hits[0].ssd_blocks) == (3, 0, 0, 0)
    answer = client.apply(releases=[Release(A)])
    assert (answer.counts.free, answer.counts.evictable, answer.counts.granted) == (11, 3, 2)
    audit = client.call(client.stub.Audit, pb.AuditRequest())
    assert audit.ok and not audit.findings and audit.checked_blocks >= 16


def test_batches_are_pipelined_and_answered_in_order(client: Client) -> None:
    client.open()
    messages = [client.message(number, grant=1) for number in range(1, 9)]
    answers = [decode_answer(answer) for answer in client.stub.Apply(iter(messages), timeout=10)]
    assert [answer.op_seq for answer in answers] == list(range(1, 9))
    assert answers[-1].counts.granted == 8


def test_a_broken_stream_sends_again_from_the_first_unanswered(client: Client) -> None:
    client.open()
    first = client.apply(grant=2)
    client.break_stream()
    again = client.send(client.message(1, grant=2))
    assert again.granted == first.granted
    assert client.apply(grant=1).counts.granted == 3
    with pytest.raises(Conflict) as gap:
        client.send(client.message(9))
    assert (gap.value.field, gap.value.limit) == ("op_seq", "3")
    assert client.apply().counts.granted == 3


def test_a_malformed_batch_is_refused_whole(client: Client) -> None:
    client.open()
    client.apply(grant=1)
    for broken in (
        pb.Batch(acquires=[pb.Acquire(request=1, keys=b"x" * 31)], grant=1),
        pb.Batch(releases=[pb.Release(request=1, blocks=bytes(8 * 3))], grant=1, withdraws=[pb.Withdraw()]),
        pb.Batch(binds=[pb.Bind(request=1, blocks=b"\xff" * 8)], grant=1),
    ):
        broken.executor, broken.epoch, broken.boot_id, broken.op_seq = client.executor, client.epoch, client.boot_id, 2
        with pytest.raises(InvalidRequest) as caught:
            client.send(broken)
        assert caught.value.field
    assert client.send(client.message(2)).counts.granted == 1


def test_a_higher_incarnation_fences(cache: ServiceProcess, client: Client) -> None:
    other = Client(cache.target, "fenced", 5)
    other.open()
    other.apply(grant=3)
    newer = Client(cache.target, "fenced", 6)
    newer.open()
    with pytest.raises(Conflict) as stale:
        other.apply()
    assert stale.value.field == "epoch"
    with pytest.raises(JitneyError) as refused:
        client.call(
            other.stub.Open, pb.OpenRequest(executor="fenced", incarnation=5, blocks=1, block_bytes=1, block_tokens=1)
        )
    assert isinstance(refused.value, Conflict)
    assert refused.value.field == "incarnation"
    assert newer.apply().counts.free == 16
    other.close()
    newer.close()


def test_a_stream_is_that_of_one_executor(cache: ServiceProcess, client: Client) -> None:
    client.open()
    other = Client(cache.target, "other", 1)
    other.open()
    client.apply(grant=1)
    with pytest.raises(InvalidRequest) as refused:
        client.send(other.message(1, grant=1))
    assert refused.value.field == "executor"
    assert other.apply(grant=1).counts.granted == 1
    other.close()


def test_redeclare_over_the_wire(client: Client) -> None:
    client.open(redeclares=True)
    with pytest.raises(Conflict) as early:
        client.apply(grant=1)
    assert early.value.field == "redeclare"
    declared = [DeclaredBlock(handle(number, 7), BlockState.WRITING, holders=[A]) for number in range(4)]
    with pytest.raises(InvalidRequest):
        client.redeclare(pb.Declaration(blocks=encode_declared(declared)))
    with pytest.raises(InvalidRequest) as endless:
        client.redeclare(*(pb.Declaration(blocks=encode_declared(declared)) for _ in range(100)))
    assert (endless.value.field, endless.value.limit, endless.value.value) == ("blocks", "16", "20")
    answer = client.redeclare(
        pb.Declaration(blocks=encode_declared(declared[:2])),
        pb.Declaration(blocks=encode_declared(declared[2:]), complete=True),
    )
    assert (answer.blocks, answer.counts.free) == (4, 12)
    client.op_seq = 0
    assert client.apply(releases=[Release(A)]).counts.free == 16
    with pytest.raises(Conflict):
        client.redeclare(pb.Declaration(complete=True))


def test_a_ticket_that_was_never_given_is_refused(client: Client) -> None:
    client.open()
    calls = [encode_call(None), encode_call(LoadDone(Ticket(3), 0))]
    for call in calls:
        call.executor, call.epoch, call.boot_id = client.executor, client.epoch, client.boot_id
    events = client.stub.Tickets(iter(calls), timeout=10)
    with pytest.raises(grpc.RpcError) as caught:
        next(events)
    error = from_rpc_error(caught.value)
    assert isinstance(error, Missing)
    assert (error.field, error.value) == ("ticket", "3")


@pytest.mark.parametrize("what", ["prefix_key", "tenant", "salt_digest", "model_version"])
def test_invalidate_removes_what_is_held_too(client: Client, what: str) -> None:
    client.open()
    old, held = prompt(1, 2, 3), prompt(1, 9)
    blocks = client.apply(**boarding((1, old, 0))).reserves[0].blocks
    seal = old.seal(1, blocks, tenant="acme")
    client.apply(seals=[seal])
    blocks = client.apply(**boarding((2, held, 0))).reserves[0].blocks
    client.apply(seals=[held.seal(2, blocks, 1, tenant="acme")], releases=[Release(A)])
    values: dict[str, Any] = {
        "prefix_key": old.root,
        "tenant": "acme",
        "salt_digest": seal.salt_digest,
        "model_version": "model",
    }
    answer = client.call(client.stub.Invalidate, pb.InvalidateRequest(**{what: values[what]}))
    assert (answer.device_blocks, answer.cpu_blocks) == (4, 0)
    chains = [Chain(RequestId(3), old.keys), Chain(RequestId(3), held.keys)]
    hits = decode_hits(client.call(client.stub.Lookup, encode_chains("executor-0", chains)))
    assert [hit.device_blocks for hit in hits] == [0, 0]
    assert client.call(client.stub.Audit, pb.AuditRequest()).ok
    with pytest.raises(InvalidRequest):
        client.call(client.stub.Invalidate, pb.InvalidateRequest())


def test_bad_calls(client: Client) -> None:
    with pytest.raises(InvalidRequest):
        client.open(blocks=0)
    client.open()
    with pytest.raises(Missing):
        client.call(client.stub.Lookup, encode_chains("nobody", []))
    with pytest.raises(InvalidRequest) as many:
        client.call(client.stub.Lookup, encode_chains("executor-0", [Chain(A, [])] * 65))
    assert (many.value.limit, many.value.value) == ("64", "65")
    client.boot_id = bytes(16)
    with pytest.raises(Conflict) as boot:
        client.apply()
    assert boot.value.field == "boot_id"


def test_status(client: Client) -> None:
    client.open()
    client.apply(**boarding((1, prompt(1, 2), 0)))
    status = client.call(client.stub.GetStatus, pb.GetStatusRequest())
    assert status.boot_id == client.boot_id
    mine = next(each for each in status.executors if each.executor == "executor-0")
    assert (mine.epoch, mine.op_seq, mine.requests, mine.redeclaring) == (client.epoch, 1, 1, False)
    assert mine.counts.free == 14
    assert status.missed_tokens >= 2 * BLOCK_TOKENS


def test_a_killed_cache_has_another_boot_id_and_takes_a_declaration(tmp_path: Path) -> None:
    with service("cache_svc", folder=tmp_path) as process:
        client = Client(process.target)
        client.open()
        wanted = prompt(1, 2)
        blocks = client.apply(**boarding((1, wanted, 0))).reserves[0].blocks
        client.apply(seals=[wanted.seal(1, blocks)])
        before = client.boot_id
        process.signal(signal.SIGKILL)
        wait_until(lambda: process.ended() is not None)
        process.start()
        wait_until(lambda: process.listens() and process.serves())
        client.close()
        client.connect(process.target)
        with pytest.raises(Conflict) as caught:
            client.apply()
        assert caught.value.field == "boot_id"
        client.open(redeclares=True)
        assert client.boot_id != before
        sealed = [
            DeclaredBlock(
                block,
                BlockState.SEALED,
                wanted.keys[at],
                wanted.keys[at - 1] if at else wanted.root,
                wanted.seal(1, [block], at).token_ids,
                holders=[A],
            )
            for at, block in enumerate(blocks)
        ]
        client.redeclare(pb.Declaration(blocks=encode_declared(sealed), complete=True))
        answer = client.apply(**boarding((2, wanted, 0)))
        assert answer.acquires[0].blocks == blocks
        client.close()


def test_it_stops_cleanly_while_a_stream_is_open(tmp_path: Path) -> None:
    with service("cache_svc", folder=tmp_path) as process:
        client = Client(process.target)
        client.open()
        client.apply(grant=1)
        process.signal(signal.SIGTERM)
        wait_until(lambda: process.exit_status() is not None)
        assert process.exit_status() == 0
        client.close()
    events = [json.loads(line)["event"] for line in (tmp_path / "jitney.log").read_text().splitlines()]
    assert events[-1] == "stopped"


def test_a_wrong_setting_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cache_svc", "--audit-idle-s=-1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "audit-idle-s" in done.stderr


def test_an_incarnation_that_cannot_have_begun_yet_is_refused(tmp_path: Path) -> None:
    with service("cache_svc", folder=tmp_path) as process:
        with pytest.raises(InvalidRequest, match="boot clock") as refused:
            Client(process.target, incarnation=1 << 62).open()
        assert refused.value.field == "incarnation"
        Client(process.target).open()
