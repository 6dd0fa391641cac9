"""A real process on the server plumbing: errors, limits, health, and what a stop does to whom."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jitney import errors
from jitney.errors import JitneyError
from jitney.executor.v1 import executor_pb2 as pb
from jitney.executor.v1 import executor_pb2_grpc
from jitney.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from jitney.service_process import ServiceProcess
from jitney.serving import channels, status
from tests.support.processes import is_running, service, wait_until

TINY = "tests.support.tiny_service"
Body = Callable[[Any, ServiceProcess], Coroutine[Any, Any, None]]


def with_tiny(folder: Path, body: Body, *argv: str) -> None:
    """Runs `body(stub, process)` against a tiny service."""

    async def main() -> None:
        async with channels.channel(process.target) as link:
            await body(executor_pb2_grpc.ExecutorStub(link), process)

    with service(TINY, *argv, folder=folder) as process:
        asyncio.run(main())


async def failure(call: Any) -> JitneyError:
    """What a call raises, as our error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return status.from_rpc_error(caught.value)


async def exit_status(process: ServiceProcess) -> int:
    await asyncio.to_thread(wait_until, lambda: process.exit_status() is not None)
    code = process.exit_status()
    assert code is not None
    return code


def generate(stub: Any, count: int) -> Any:
    return stub.Generate(pb.GenerateRequest(max_tokens=count))


async def started(stub: Any, count: int) -> tuple[Any, Any]:
    """A stream of which the first message has come."""
    call = generate(stub, count)
    stream = aiter(call)
    await anext(stream)
    return call, stream


def test_typed_errors_and_bugs(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        invalid = await failure(stub.Abort(pb.AbortRequest(request_id="invalid")))
        assert (type(invalid), invalid.field, invalid.limit, invalid.value) == (errors.InvalidRequest, "n", "2", "3")
        full = await failure(stub.Abort(pb.AbortRequest(request_id="full")))
        assert (type(full), full.retry_after_us) == (errors.TooLarge, 1_500_000)
        plain = await failure(stub.Abort(pb.AbortRequest(request_id="plain")))
        assert (type(plain), plain.message) == (JitneyError, "a step failed")

        bug = await failure(stub.Abort(pb.AbortRequest(request_id="bug")))
        assert type(bug) is JitneyError
        assert "secret" not in bug.message
        logged = [record for record in process.said() if record["event"] == "unexpected error"]
        assert [record["error_id"] for record in logged] == [bug.value]
        frames = logged[0]["exception"][0]["frames"]
        assert frames
        assert not any(frame.get("locals") for frame in frames)

        assert await stub.Abort(pb.AbortRequest(request_id="fine")) == pb.AbortResponse()
        assert (await failure(stub.GetModelInfo(pb.GetModelInfoRequest()))).message.endswith("is not offered here")

    with_tiny(tmp_path, body)


def test_bytes_that_are_no_message_are_a_typed_error(tmp_path: Path) -> None:
    async def body(_: Any, process: ServiceProcess) -> None:
        async with channels.channel(process.target) as link:
            abort: Any = link.unary_unary("/jitney.executor.v1.Executor/Abort")
            stream: Any = link.unary_stream("/jitney.executor.v1.Executor/Generate")
            for call in (abort(b"\xff" * 9), stream(b"\xff" * 9)):
                error = await failure(call)
                assert (type(error), error.field, error.value) == (errors.InvalidRequest, "message", "9")
        assert not [record for record in process.said() if record["level"] == "error"]

    with_tiny(tmp_path, body)


def test_a_message_over_the_limit_is_refused_by_its_size(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        big = pb.GenerateRequest(text="x" * 200_000, max_tokens=1)
        error = await failure(stub.Generate(big))
        assert (type(error), error.limit) == (errors.TooLarge, str(1 << 16))
        assert int(error.value) > 200_000
        neighbour = [event async for event in generate(stub, 3)]
        assert len(neighbour) == 3

    with_tiny(tmp_path, body, "--max-message-bytes=65536")


def test_drain_lets_running_streams_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        _, stream = await started(stub, 60)
        process.signal(signal.SIGTERM)
        while await channels.health(process.target) == "SERVING":
            await asyncio.sleep(0.01)
        assert await channels.health(process.target) == "NOT_SERVING"
        assert await channels.health(process.target, "jitney.executor.v1.Executor") == "NOT_SERVING"
        assert await channels.health(process.target, "live") == "SERVING"
        refused = await failure(stub.Abort(pb.AbortRequest(request_id="fine")))
        assert type(refused) is errors.Away
        assert refused.retry_after_us > 0
        assert len([event async for event in stream]) == 59
        assert await exit_status(process) == 0

    with_tiny(tmp_path, body)


def test_what_outlasts_the_grace_gets_a_typed_error(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        _, stream = await started(stub, 10_000)
        process.signal(signal.SIGINT)
        error = await failure(stream)
        assert (type(error), error.field, error.limit) == (errors.Away, "grace_s", "0.3")
        assert await exit_status(process) == 0

    with_tiny(tmp_path, body, "--grace-s=0.3")


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        _, stream = await started(stub, 10_000)
        process.signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        process.signal(signal.SIGTERM)
        assert await exit_status(process) == 128 + signal.SIGTERM
        assert type(await failure(stream)) is errors.Away

    with_tiny(tmp_path, body)


def test_an_echo_of_the_first_signal_is_no_second_one(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        _, stream = await started(stub, 50)
        for _ in range(3):
            process.signal(signal.SIGTERM)
            await asyncio.sleep(0.01)
        assert len([event async for event in stream]) == 49
        assert await exit_status(process) == 0

    with_tiny(tmp_path, body)


def test_a_killed_server_is_away_to_its_callers(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        _, stream = await started(stub, 10_000)
        process.signal(signal.SIGKILL)
        assert type(await failure(stream)) is errors.Away
        assert type(await failure(stub.Abort(pb.AbortRequest(request_id="fine")))) is errors.Away
        assert await exit_status(process) == -signal.SIGKILL

    with_tiny(tmp_path, body)


def test_sessions_do_not_hold_up_a_drain(tmp_path: Path) -> None:
    async def body(_: Any, process: ServiceProcess) -> None:
        async with channels.channel(process.target) as link:
            session = scheduler_pb2_grpc.SchedulerStub(link).Decide()
            await session.write(scheduler_pb2.Snapshot(step=7))
            assert (await session.read()).step == 7
            process.signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await session.read()
            assert type(status.from_rpc_error(caught.value)) is errors.Away
            assert await exit_status(process) == 0

    with_tiny(tmp_path, body, "--grace-s=600")


def test_a_cancelled_stream_leaves_nothing_that_a_drain_waits_for(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        call, _ = await started(stub, 10_000)
        call.cancel()
        unread = generate(stub, 10_000)
        await asyncio.sleep(0.1)
        unread.cancel()
        await asyncio.sleep(0.1)
        process.signal(signal.SIGTERM)
        assert await exit_status(process) == 0
        assert not [record for record in process.said() if record.get("level") in ("error", "warning")]

    with_tiny(tmp_path, body, "--grace-s=600")


def test_a_stalled_reader_cannot_hold_up_the_end(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        await started(stub, 10_000)
        process.signal(signal.SIGTERM)
        assert await exit_status(process) == 0

    with_tiny(tmp_path, body, "--grace-s=0.2")


def test_a_server_can_stop_itself_with_a_status(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        await stub.Abort(pb.AbortRequest(request_id="stop"))
        assert await exit_status(process) == 3

    with_tiny(tmp_path, body)


def test_it_listens_while_it_loads(tmp_path: Path) -> None:
    with service(TINY, "--load-s=1.5", folder=tmp_path, serving=False) as process:
        wait_until(lambda: asyncio.run(channels.health(process.target)) == "NOT_SERVING")
        assert asyncio.run(channels.health(process.target, "live")) == "SERVING"
        wait_until(lambda: process.progress() is not None)
        wait_until(process.serves)


def test_a_signal_while_loading_ends_it(tmp_path: Path) -> None:
    with service(TINY, "--load-s=600", folder=tmp_path, serving=False) as process:
        process.signal(signal.SIGTERM)
        wait_until(lambda: process.exit_status() == 0)
        assert not (tmp_path / "tiny_service.port").exists()


def test_what_cannot_load_says_why_in_one_line(tmp_path: Path) -> None:
    cannot_load = service(TINY, "--cannot-load", folder=tmp_path)
    with pytest.raises(AssertionError, match="ended with 1: the model file is truncated"), cannot_load:
        pass


def test_a_port_in_use_is_an_error(tmp_path: Path) -> None:
    with service(TINY, folder=tmp_path) as process:
        second = ServiceProcess("second", TINY, (), tmp_path, port=process.port)
        second.start()
        try:
            wait_until(lambda: second.exit_status() is not None)
            assert second.exit_status() == 1
            assert f"cannot listen on 127.0.0.1:{process.port}" in second.last_words()
        finally:
            second.end(0.0)


def test_a_wrong_setting_is_one_line_and_status_2(tmp_path: Path) -> None:
    wrong = service(TINY, "--grace-s=-1", folder=tmp_path)
    with pytest.raises(AssertionError, match="ended with 2: tiny: --grace-s must be at least 0"), wrong:
        pass


def test_every_log_line_is_json_with_time_level_and_service(tmp_path: Path) -> None:
    with service(TINY, folder=tmp_path) as process:
        events = [record["event"] for record in process.said()]
        assert events[0] == "configuration"
        assert events[-2:] == ["listening", "ready"] or events[-1] == "ready"
    for line in (tmp_path / "jitney.log").read_text().splitlines():
        assert {"timestamp", "level", "service", "pid", "event"} <= set(json.loads(line))


def test_a_misspelt_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_TINY_GRAZE_S", "3")
    with service(TINY, folder=tmp_path) as process:
        warnings = [record for record in process.said() if record["level"] == "warning"]
        assert [record["variables"] for record in warnings] == [["JITNEY_TINY_GRAZE_S"]]


PARENT = """
import sys, time
from pathlib import Path
from jitney.service_process import ServiceProcess
process = ServiceProcess("orphan", sys.argv[1], (), Path(sys.argv[2]))
process.start()
while not process.listens():
    time.sleep(0.02)
print(process.pid, flush=True)
time.sleep(600)
"""


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, TINY, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not is_running(child))


def test_reflection_names_the_services(tmp_path: Path) -> None:
    async def body(_: Any, process: ServiceProcess) -> None:
        link: Any
        async with channels.channel(process.target) as link:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(link)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            answer = await call.read()
            await call.done_writing()
            names = {service.name for service in answer.list_services_response.service}
            assert {"jitney.executor.v1.Executor", "grpc.health.v1.Health"} <= names

    with_tiny(tmp_path, body)


def test_connections_are_renewed_where_an_age_is_set(tmp_path: Path) -> None:
    async def body(stub: Any, process: ServiceProcess) -> None:
        for _ in range(6):
            assert len([event async for event in generate(stub, 10)]) == 10

    with_tiny(tmp_path, body, "--max-connection-age-s=0.2")
