"""The scheduler on the wire, in a server of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from jitney.errors import InvalidRequest, JitneyError, Missing
from jitney.scheduler.v1 import scheduler_pb2 as pb
from jitney.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from jitney.scheduler_codec import decode_decision, digest_of, encode_decision, encode_snapshot
from jitney.serving import logs
from jitney.serving.channels import channel
from jitney.serving.status import from_rpc_error
from jitney.snapshot import Blocks, PolicyChoice, PolicyMemory, Settings, Snapshot
from scheduler_svc.build import BUILD
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.decide import decide
from scheduler_svc.server import answer, scheduler_server
from tests.support.situations import random_snapshot, running, waiting


def with_server(test: Callable[[Any], Awaitable[None]]) -> None:
    """Runs `test` with a stub of a server that lives as long."""

    async def main() -> None:
        server = scheduler_server(SchedulerConfig(log_level="error"))
        await server.start()
        try:
            async with channel(server.address) as link:
                stub: Any = pb_grpc.SchedulerStub(link)
                await test(stub)
        finally:
            await server.close()

    asyncio.run(main())


def message(snapshot: Snapshot) -> Any:
    return pb.Snapshot.FromString(encode_snapshot(snapshot))


async def refused(call: Awaitable[Any]) -> JitneyError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return from_rpc_error(error.value)


def test_a_decision_for_each_snapshot_in_order() -> None:
    async def test(stub: Any) -> None:
        call = stub.Decide()
        for seed in range(20):
            snapshot = replace(random_snapshot(random.Random(seed), 5, 9), step=seed)
            await call.write(message(snapshot))
            got = await call.read()
            assert (got.step, got.build) == (seed, BUILD)
            data = encode_snapshot(snapshot)
            expected = decide(replace(snapshot, digest=digest_of(data)))
            assert got.SerializeToString(deterministic=True) == encode_decision(expected)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF

    with_server(test)


def test_decide_once_is_the_twin() -> None:
    async def test(stub: Any) -> None:
        snapshot = random_snapshot(random.Random(1), 5, 9)
        got = await stub.DecideOnce(message(snapshot))
        assert got.SerializeToString(deterministic=True) == answer(encode_snapshot(snapshot))

    with_server(test)


def test_a_bad_snapshot_ends_its_own_stream_and_nothing_else() -> None:
    async def test(stub: Any) -> None:
        good, bad = stub.Decide(), stub.Decide()
        for call in (good, bad):
            await call.write(message(Snapshot()))
            await call.read()
        await bad.write(message(Snapshot(settings=Settings(max_rows=0))))
        error = await refused(bad.read())
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.limit, error.value) == ("settings.max_rows", "at least 1", "0")
        await good.write(message(Snapshot(step=2)))
        assert (await good.read()).step == 2

    with_server(test)


def test_typed_errors() -> None:
    async def test(stub: Any) -> None:
        old = message(Snapshot())
        old.contract_version = 9
        error = await refused(stub.DecideOnce(old))
        assert isinstance(error, InvalidRequest) and (error.field, error.value) == ("contract_version", "9")
        error = await refused(stub.DecideOnce(message(Snapshot(policy=PolicyChoice("lottery")))))
        known = "deadline, fair, fcfs, mlfq, priority, sjf"
        assert isinstance(error, InvalidRequest) and (error.field, error.limit) == ("policy.name", known)
        uneven = message(Snapshot(running=running({}, {})))
        uneven.running.prompt_tokens = b"\1\0\0\0"
        error = await refused(stub.DecideOnce(uneven))
        assert isinstance(error, InvalidRequest) and error.field == "running.prompt_tokens"
        error = await refused(stub.Explain(pb.ExplainRequest(snapshot=message(Snapshot()), id=5)))
        assert isinstance(error, Missing)

    with_server(test)


def test_explain_and_list_policies() -> None:
    async def test(stub: Any) -> None:
        snapshot = Snapshot(
            settings=Settings(max_rows=1), blocks=Blocks(9, 9), running=running({}), waiting=waiting({})
        )
        told = await stub.Explain(pb.ExplainRequest(snapshot=message(snapshot), id=101))
        assert (told.state, told.reason) == ("waiting", pb.WAIT_REASON_ROWS)
        assert told.sentence == "needs a row, all 1 are taken (fcfs: it arrived 0 ms ago)"
        listed = await stub.ListPolicies(pb.ListPoliciesRequest())
        assert listed.contract_version == 1 and listed.build == BUILD
        columns = {policy.name: list(policy.waiting_columns) for policy in listed.policies}
        assert list(columns) == ["deadline", "fair", "fcfs", "mlfq", "priority", "sjf"]
        assert columns["fcfs"] == ["arrival_us", "new_tokens", "preemptions", "tenant", "tokens"]
        tables = {policy.name: list(policy.tables) for policy in listed.policies}
        assert (tables["fcfs"], tables["fair"], tables["mlfq"]) == ([], ["tenants"], ["histograms"])

    with_server(test)


def test_only_the_columns_that_a_policy_lists_are_needed() -> None:
    async def test(stub: Any) -> None:
        for listed in (await stub.ListPolicies(pb.ListPoliciesRequest())).policies:
            sent = message(Snapshot(policy=PolicyChoice(listed.name), waiting=waiting({}, {})))
            for field in list(sent.waiting.DESCRIPTOR.fields_by_name):
                if field not in (*listed.waiting_columns, "id"):
                    sent.waiting.ClearField(field)
            decision = decode_decision((await stub.DecideOnce(sent)).SerializeToString())
            assert sum(count for _, count in decision.waiting_reasons) == 2

    with_server(test)


def test_a_memory_in_another_format_is_told_in_the_log() -> None:
    logs.configure("scheduler", "info", "json")
    kept = PolicyMemory("fair", version=99, content=b"what a later build keeps")
    with capture_logs() as said:
        answer(encode_snapshot(Snapshot()))
        assert not said
        decision = decode_decision(answer(encode_snapshot(Snapshot(step=3, memory=kept))))
    assert decision.memory == PolicyMemory()
    assert [(line["log_level"], line["step"], line["version"]) for line in said] == [("warning", 3, 99)]
