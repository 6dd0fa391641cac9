"""The executor's service with everything real behind it: a tiny model, a scheduler and a cache, each a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import grpc.aio
import numpy as np
import pytest

from executor_svc.tokenizer import Tokenizer, load_tokenizer
from jitney.client.aio import AsyncClient
from jitney.client.types import Options
from jitney.errors import Aborted, Conflict, Duplicate, Expired, InvalidRequest, JitneyError, Missing, TooLarge
from jitney.executor.v1 import executor_pb2 as pb
from jitney.executor.v1 import executor_pb2_grpc
from jitney.scheduler.v1 import scheduler_pb2
from jitney.scheduler_codec import digest_of
from jitney.serving.channels import channel
from jitney.serving.status import from_rpc_error
from jitney.supervisor import ServeOptions, Supervisor
from scheduler_svc.lengths.trees import LengthTable, Trees, write_table
from tests.support.ports import free_ports
from tests.support.tiny_llama import IM_END, make_tiny_llama

CONTEXT, BLOCK, POOL, ROWS = 512, 16, 96, 4
LONG = 400
CODES = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Duplicate: grpc.StatusCode.ALREADY_EXISTS,
    Missing: grpc.StatusCode.NOT_FOUND,
    Conflict: grpc.StatusCode.FAILED_PRECONDITION,
    Aborted: grpc.StatusCode.ABORTED,
    Expired: grpc.StatusCode.DEADLINE_EXCEEDED,
    TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), context=CONTEXT)


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def services(model: Path, metrics_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    state = tmp_path_factory.mktemp("state")
    arguments = (
        f"--model={model}",
        f"--cache-dir={state}",
        f"--pool-blocks={POOL}",
        f"--max-rows={ROWS}",
        "--max-step-tokens=64",
        "--chunk-cap-tokens=32",
        "--max-message-bytes=1048576",
        "--threads=1",
        f"--metrics-port={metrics_port}",
    )
    with Supervisor(ServeOptions(state_dir=state, grace_s=5, executor_args=arguments)) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


@contextlib.asynccontextmanager
async def stub_of(services: Supervisor) -> AsyncIterator[Any]:
    async with channel(services.executor_target) as link:
        yield executor_pb2_grpc.ExecutorStub(link)


def run(services: Supervisor, test: Callable[[Any], Awaitable[None]]) -> None:
    """Runs a test with a stub; afterwards nothing may be left in the executor."""

    async def main() -> None:
        async with asyncio.timeout(60), stub_of(services) as stub:
            await test(stub)
            await idle_clean(stub)

    asyncio.run(main())


async def idle_clean(stub: Any, timeout_s: float = 20.0) -> pb.GetStatusResponse:
    """Waits until nothing runs or waits and every block is free or merely cached."""
    end = time.monotonic() + timeout_s
    while True:
        now: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest())
        blocks = now.blocks
        if not now.num_running and not now.num_waiting and blocks.free + blocks.evictable + blocks.granted == POOL:
            return now
        assert time.monotonic() < end, f"not idle: {now}"
        await asyncio.sleep(0.02)


def asked(*ids: int, **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids or (70, 71, 72)), **more)


def long(*ids: int, **more: Any) -> pb.GenerateRequest:
    """Goes on for a second or so."""
    return asked(*ids, ignore_eos=True, **{"max_tokens": LONG, **more})


class Collected:
    """A whole stream, and how it ended."""

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self.ids: list[int] = []
        self.logprobs: list[pb.TokenLogprobs] = []
        self.text = ""
        self.finished: pb.Finished | None = None
        self.error: JitneyError | None = None
        self.code = grpc.StatusCode.OK

    async def read(self, call: Any, tokens: int = 1 << 30) -> Collected:
        """Reads to the end, or until so many tokens are there."""
        try:
            while len(self.ids) < tokens and (event := await call.read()) is not grpc.aio.EOF:
                assert self.finished is None, "an event after Finished"
                kind = event.WhichOneof("event")
                if kind == "started":
                    assert self.started is None and not self.ids
                    self.started = event.started
                elif kind == "delta":
                    assert self.started is not None
                    assert event.delta.token_ids or event.delta.text
                    self.ids += event.delta.token_ids
                    self.logprobs += event.delta.logprobs
                    self.text += event.delta.text
                else:
                    self.finished = event.finished
        except grpc.aio.AioRpcError as error:
            self.code, self.error = error.code(), from_rpc_error(error)
        return self


async def whole(stub: Any, request: pb.GenerateRequest) -> Collected:
    return await Collected().read(stub.Generate(request))


async def refusal(call: Awaitable[Any]) -> JitneyError:
    """The typed error of a unary call, whose code must be that of its class."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert caught.value.code() is CODES[type(error)]
    return error


# Whole answers.


def test_a_stream_from_start_to_finish(services: Supervisor, tokenizer: Tokenizer) -> None:
    async def test(stub: Any) -> None:
        got = await whole(stub, long(return_prompt_token_ids=True, request_id="mine", max_tokens=50))
        assert got.started is not None and got.finished is not None and got.error is None
        assert (got.started.request_id, got.started.prompt_tokens, got.started.max_tokens) == ("mine", 3, 50)
        assert list(got.started.prompt_token_ids) == [70, 71, 72]
        assert len(got.ids) == 50 and not got.logprobs
        assert got.text == tokenizer.decode(got.ids)
        assert got.finished.reason == pb.FINISH_REASON_LENGTH
        usage, timings = got.finished.usage, got.finished.timings
        assert (usage.prompt_tokens, usage.generated_tokens, usage.cached_device_tokens) == (3, 50, 0)
        assert (usage.billable_microtokens, usage.billable_tokens) == (53_000_000, 53)
        assert 0 < timings.queue_us <= timings.ttft_us < timings.total_us
        assert timings.tpot_us == (timings.total_us - timings.ttft_us) // 49
        assert timings.steps == 50

    run(services, test)


def test_explain_cache_says_where_a_prompt_leaves_the_cached_prefix(services: Supervisor) -> None:
    ids = list(range(200, 240))

    async def asked(stub: Any, prompt: list[int], salt: str = "") -> pb.ExplainCacheResponse:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), salt=salt)
        found: pb.ExplainCacheResponse = await stub.ExplainCache(pb.ExplainCacheRequest(request=request))
        return found

    async def test(stub: Any) -> None:
        assert (await asked(stub, ids)).device_tokens == 0
        await stub.GenerateOnce(pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_tokens=1))
        deadline = time.monotonic() + 10
        while (found := await asked(stub, ids)).device_tokens < 32 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert (found.prompt_tokens, found.block_tokens, found.device_tokens, found.hit_tokens) == (40, 16, 32, 32)
        assert "at token 32, where its last, unfilled block begins" in found.sentence
        assert len(found.prefix_key) == 32 and found.model_version
        assert len(found.keys) == 3 and found.keys[2] == found.prefix_key
        parts = await asked(stub, [*ids[:16], *ids[:16]])
        assert (parts.device_tokens, parts.hit_tokens) == (16, 16) and "at token 16: " in parts.sentence
        assert (await asked(stub, ids, "other")).device_tokens == 0
        error = await refusal(stub.ExplainCache(pb.ExplainCacheRequest()))
        assert isinstance(error, InvalidRequest) and error.field == "prompt"
        error = await refusal(asked(stub, [1] * CONTEXT))
        assert isinstance(error, InvalidRequest) and error.field == "prompt"

    run(services, test)


def test_unary_and_streams_and_all_kinds_of_prompts_agree(services: Supervisor, tokenizer: Tokenizer) -> None:
    chat = "<|im_start|>user\nhow many<|im_end|>\n<|im_start|>assistant\n"
    messages = [pb.ChatMessage(role="user", content="how many")]

    async def test(stub: Any) -> None:
        answers = []
        for prompt in (
            {"text": chat},
            {"token_ids": pb.TokenIds(ids=tokenizer.encode(chat).tolist())},
            {"chat": pb.Chat(messages=messages)},
        ):
            request = pb.GenerateRequest(max_tokens=30, logprobs=2, **prompt)
            got = await whole(stub, request)
            once = await stub.GenerateOnce(request)
            assert list(once.token_ids) == got.ids and once.text == got.text
            assert list(once.logprobs) == got.logprobs
            assert once.started.prompt_tokens == got.started.prompt_tokens if got.started else False
            assert once.finished.reason == got.finished.reason if got.finished else False
            answers.append((got.ids, got.text))
        assert answers[0] == answers[1] == answers[2]

    run(services, test)


@pytest.mark.parametrize("top", [0, 1, 20])
def test_one_logprob_for_each_token(services: Supervisor, top: int) -> None:
    async def test(stub: Any) -> None:
        got = await whole(stub, long(max_tokens=20, logprobs=top))
        assert len(got.logprobs) == len(got.ids) == 20
        for token, values in zip(got.ids, got.logprobs, strict=True):
            assert len(values.top_ids) == len(values.top_logprobs) == top
            assert values.logprob <= 0
            if top:
                assert values.top_ids[0] == token  # greedy
                assert values.top_logprobs[0] == values.logprob
                assert sorted(values.top_logprobs, reverse=True) == list(values.top_logprobs)

    run(services, test)


def test_a_seed_gives_the_same_answer_again(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        drawn = pb.Sampling(temperature=1.5)
        first = await whole(stub, long(max_tokens=30, sampling=drawn))
        assert first.started is not None
        again = pb.Sampling(temperature=1.5, seed=first.started.hint.seed)
        assert (await whole(stub, long(max_tokens=30, sampling=again))).ids == first.ids
        assert (await whole(stub, long(max_tokens=30, sampling=drawn))).ids != first.ids

    run(services, test)


def test_stop_tokens_and_stop_strings(services: Supervisor, tokenizer: Tokenizer) -> None:
    async def test(stub: Any) -> None:
        free = await whole(stub, long(max_tokens=60))
        at = next(i for i in range(20, 60) if free.ids[i] not in free.ids[:i])
        by_token = await whole(stub, long(max_tokens=60, stop_token_ids=[free.ids[at]]))
        assert by_token.ids == free.ids[: at + 1]
        assert by_token.text == tokenizer.decode(free.ids[:at])
        assert by_token.finished is not None and by_token.finished.stop_token_id == free.ids[at]
        assert by_token.finished.reason == pb.FINISH_REASON_STOP

        stop = next(free.text[i : i + 4] for i in range(30, 200) if "\ufffd" not in free.text[i : i + 4])
        by_text = await whole(stub, long(max_tokens=60, stop=[stop, "never said"]))
        assert by_text.finished is not None and by_text.finished.stop_matched == stop
        assert by_text.text == free.text[: free.text.index(stop)]
        assert by_text.ids == free.ids[: len(by_text.ids)]
        assert stop in tokenizer.decode(by_text.ids)
        assert stop not in tokenizer.decode(by_text.ids[:-1])

    run(services, test)


# Bad input, seen from outside.


def test_bad_input_leaves_neighbours_alone(services: Supervisor) -> None:
    bad: list[tuple[pb.GenerateRequest, type[JitneyError], str]] = [
        (pb.GenerateRequest(), InvalidRequest, "prompt"),
        (pb.GenerateRequest(text=""), InvalidRequest, "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), InvalidRequest, "token_ids"),
        (asked(512), InvalidRequest, "token_ids.ids[0]"),
        (asked(*range(3, 512), 3, 3, 3), InvalidRequest, "prompt"),
        (asked(max_tokens=0), InvalidRequest, "max_tokens"),
        (asked(max_tokens=-1), InvalidRequest, "max_tokens"),
        (asked(max_tokens=CONTEXT), InvalidRequest, "max_tokens"),
        (asked(sampling=pb.Sampling(temperature=float("nan"))), InvalidRequest, "sampling.temperature"),
        (asked(sampling=pb.Sampling(top_p=1.1)), InvalidRequest, "sampling.top_p"),
        (asked(priority=101), InvalidRequest, "priority"),
        (asked(tenant="\x1b[2J"), InvalidRequest, "tenant"),
        (asked(request_id="é" * 200), InvalidRequest, "request_id"),
        (asked(n=33), InvalidRequest, "n"),
        (
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="root")])),
            InvalidRequest,
            "chat.messages[0].role",
        ),
        (pb.GenerateRequest(text="x" * (2 << 20)), TooLarge, "message"),
    ]

    async def test(stub: Any) -> None:
        alone = await whole(stub, long())
        before = await stub.GetStatus(pb.GetStatusRequest())
        neighbour = asyncio.create_task(whole(stub, long()))
        for request, kind, field in bad:
            got = await whole(stub, request)
            assert isinstance(got.error, kind) and got.error.field == field, (field, got.error)
            assert got.code is CODES[kind]
            assert got.started is None
            error = await refusal(stub.GenerateOnce(request))
            assert (type(error), error.field, error.limit) == (kind, field, got.error.limit)
        assert (await neighbour).ids == alone.ids
        after = await stub.GetStatus(pb.GetStatusRequest())
        assert after.refused - before.refused == 2 * (len(bad) - 1)  # the plumbing refuses a message over the limit

    run(services, test)


def test_large_messages_up_to_the_limit_get_their_own_error(services: Supervisor) -> None:
    """Case 38, with a limit of 1 MiB."""
    room = (1 << 20) - 16

    async def test(stub: Any) -> None:
        small_ids = [100] * (room - 16)  # a byte each
        for request, field in (
            (pb.GenerateRequest(text="x" * room), "text"),
            (pb.GenerateRequest(token_ids=pb.TokenIds(ids=small_ids)), "prompt"),
            (
                pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * (room - 32))])),
                "chat",
            ),
        ):
            assert request.ByteSize() <= 1 << 20
            errors = await asyncio.gather(*(whole(stub, request) for _ in range(8)))
            assert all(isinstance(got.error, InvalidRequest) and got.error.field == field for got in errors)
            over = await whole(stub, pb.GenerateRequest(text="x" * ((1 << 20) + 1)))
            assert isinstance(over.error, TooLarge) and over.error.limit == str(1 << 20)

    run(services, test)


def test_a_live_id_cannot_be_used_twice(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        call = stub.Generate(long(request_id="twice"))
        first = await Collected().read(call, tokens=1)
        error = await refusal(stub.GenerateOnce(asked(request_id="twice")))
        assert (type(error), error.field, error.value) == (Duplicate, "request_id", "twice")
        assert len((await first.read(call)).ids) == LONG
        assert (await whole(stub, asked(request_id="twice"))).error is None

    run(services, test)


# Ends before the end.


def test_abort(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        assert isinstance(await refusal(stub.Abort(pb.AbortRequest(request_id="nobody"))), Missing)
        call = stub.Generate(long(request_id="to be aborted"))
        got = await Collected().read(call, tokens=3)
        await stub.Abort(pb.AbortRequest(request_id="to be aborted"))
        await got.read(call)
        assert got.finished is not None and got.finished.reason == pb.FINISH_REASON_ABORTED
        assert got.finished.usage.generated_tokens == len(got.ids) < LONG
        assert isinstance(got.error, Aborted) and got.code is grpc.StatusCode.ABORTED
        assert isinstance(await refusal(stub.Abort(pb.AbortRequest(request_id="to be aborted"))), Missing)

    run(services, test)


def test_sums_match_what_clients_saw(services: Supervisor) -> None:
    """Case 46: aborted ones are counted as such, gauges go to 0, and the counters add up."""

    async def test(stub: Any) -> None:
        before = await stub.GetStatus(pb.GetStatusRequest())
        calls = {f"a{i}": stub.Generate(long(70 + i, request_id=f"a{i}")) for i in range(40)}
        reading = [asyncio.create_task(Collected().read(call)) for call in calls.values()]
        whole_ones = [asyncio.create_task(whole(stub, long(60 + i, max_tokens=5))) for i in range(5)]
        for request_id in calls:
            while True:
                try:
                    await stub.Abort(pb.AbortRequest(request_id=request_id))
                    break
                except grpc.aio.AioRpcError as error:  # still on its way in
                    assert error.code() is grpc.StatusCode.NOT_FOUND
                    await asyncio.sleep(0.01)
        seen = [await task for task in [*reading, *whole_ones]]
        after = await idle_clean(stub)
        reasons = [got.finished.reason for got in seen if got.finished is not None]
        assert len(reasons) == 45
        assert after.finished_aborted - before.finished_aborted == reasons.count(pb.FINISH_REASON_ABORTED) == 40
        assert after.finished_length - before.finished_length == reasons.count(pb.FINISH_REASON_LENGTH) == 5
        assert after.generated_tokens - before.generated_tokens >= sum(len(got.ids) for got in seen)

    run(services, test)


def test_what_expires_in_the_queue_costs_nothing(services: Supervisor) -> None:
    """Case 36."""

    async def test(stub: Any) -> None:
        busy = [stub.Generate(long(80 + i, max_tokens=360)) for i in range(ROWS)]  # all of them fit
        for call in busy:
            await Collected().read(call, tokens=1)
        before = await stub.GetStatus(pb.GetStatusRequest())
        queued = await asyncio.gather(*(whole(stub, long(*range(100, 150 + i), deadline_ms=100)) for i in range(30)))
        after = await stub.GetStatus(pb.GetStatusRequest())
        assert all(isinstance(got.error, Expired) and not got.ids for got in queued)
        assert after.prompt_tokens == before.prompt_tokens
        assert after.finished_deadline - before.finished_deadline == 30
        for call in busy:
            call.cancel()

    run(services, test)


@pytest.mark.parametrize("field", ["deadline_ms", "ttft_deadline_ms"])
def test_deadlines(services: Supervisor, field: str) -> None:
    async def test(stub: Any) -> None:
        busy = [stub.Generate(long(80 + i, max_tokens=360)) for i in range(ROWS)]  # all of them fit
        for call in busy:
            await Collected().read(call, tokens=1)
        got = await whole(stub, long(90, **{field: 50}))
        assert got.finished is not None and got.finished.reason == pb.FINISH_REASON_DEADLINE
        assert isinstance(got.error, Expired) and got.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert got.finished.usage.computed_prompt_tokens == 0  # it waited, and cost nothing
        error = await refusal(stub.GenerateOnce(long(90, **{field: 50})))
        assert isinstance(error, Expired)
        for call in busy:
            call.cancel()

    run(services, test)


def test_a_ttft_deadline_is_met_by_the_first_token(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        got = await whole(stub, long(ttft_deadline_ms=20_000))
        assert len(got.ids) == LONG and got.error is None

    run(services, test)


def test_the_calls_own_deadline_ends_the_request(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        before = await stub.GetStatus(pb.GetStatusRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateOnce(long(), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        after = await idle_clean(stub)
        ended = after.finished_deadline + after.finished_aborted - before.finished_deadline - before.finished_aborted
        assert ended == 1

    run(services, test)


def test_cancelled_streams_stop_working(services: Supervisor) -> None:
    """Case 32: cancelled while queued, while computing its prompt, at its first token, while decoding; unary too."""

    async def test(stub: Any) -> None:
        alone = await whole(stub, long())
        before = await idle_clean(stub)
        for rounds in range(10):
            prompt = [70 + rounds, *range(80, 280)]
            calls = [stub.Generate(long(*prompt[:n])) for n in (5, 201, 5, 201, 5, 201)]
            unary = [stub.GenerateOnce(long(*prompt[:n])) for n in (5, 201)]
            await Collected().read(calls[0], tokens=rounds * 3 + 1)
            await Collected().read(calls[2], tokens=1)
            for call in [*calls, *unary]:
                call.cancel()
            await asyncio.gather(*unary, return_exceptions=True)
        after = await idle_clean(stub)
        ended = after.finished_aborted - before.finished_aborted
        assert 0 < ended <= 80
        assert after.generated_tokens - before.generated_tokens < 80 * LONG // 4
        assert (await whole(stub, long())).ids == alone.ids

    run(services, test)


def test_a_client_that_is_killed_is_missed(services: Supervisor) -> None:
    """Its socket closes without a word of HTTP/2."""
    program = (
        "import sys, grpc\n"
        "from jitney.executor.v1 import executor_pb2 as pb, executor_pb2_grpc\n"
        "stub = executor_pb2_grpc.ExecutorStub(grpc.insecure_channel(sys.argv[1]))\n"
        "stream = stub.Generate(pb.GenerateRequest(text='the', max_tokens=400, ignore_eos=True, request_id='killed'))\n"
        "next(stream), next(stream)\n"
        "print('reads', flush=True)\n"
        "for event in stream: pass\n"
        "sys.exit('it came to its end')\n"
    )

    async def test(stub: Any) -> None:
        before = await stub.GetStatus(pb.GetStatusRequest())
        with subprocess.Popen(
            [sys.executable, "-c", program, services.executor_target], stdout=subprocess.PIPE, cwd=os.getcwd()
        ) as child:
            assert child.stdout is not None
            await asyncio.to_thread(child.stdout.readline)
            child.send_signal(signal.SIGKILL)
        after = await idle_clean(stub)
        assert after.finished_aborted == before.finished_aborted + 1

    run(services, test)


# Resuming.


def resume_of(request: pb.GenerateRequest, got: Collected) -> pb.GenerateRequest:
    assert got.started is not None
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.resume.hint.CopyFrom(got.started.hint)
    again.resume.token_ids.extend(got.ids)
    again.resume.text_bytes_received = len(got.text.encode())
    return again


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_answer_is_the_undisturbed_one(services: Supervisor, temperature: float) -> None:
    async def test(stub: Any) -> None:
        sampling = pb.Sampling(temperature=temperature, seed=9)
        undisturbed = await whole(stub, long(max_tokens=80, sampling=sampling, stop=["no such"], logprobs=1))
        for broken_after in (1, 16, 37, 79, 80):
            request = long(max_tokens=80, sampling=sampling, stop=["no such"], logprobs=1)
            call = stub.Generate(request)
            got = await Collected().read(call, tokens=broken_after)
            call.cancel()
            rest = await whole(stub, resume_of(request, got))
            assert rest.error is None and rest.started is not None and rest.finished is not None
            assert got.ids + rest.ids == undisturbed.ids
            assert got.text + rest.text == undisturbed.text
            assert got.logprobs + rest.logprobs == undisturbed.logprobs
            assert rest.finished.usage.generated_tokens == 80
            assert not rest.started.hint.not_identical

    run(services, test)


def test_a_resume_takes_over_a_live_stream(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        undisturbed = await whole(stub, long())
        request = long(request_id="moved")
        older = stub.Generate(request)
        got = await Collected().read(older, tokens=5)
        rest = await whole(stub, resume_of(request, got))
        assert got.ids + rest.ids == undisturbed.ids
        left = await Collected().read(older) if got.started is None else await got.read(older)
        assert isinstance(left.error, Aborted) and left.code is grpc.StatusCode.ABORTED

        live = stub.Generate(request)
        got = await Collected().read(live, tokens=5)
        foreign = resume_of(long(99, request_id="moved"), got)
        assert isinstance(await refusal(stub.GenerateOnce(foreign)), InvalidRequest)  # another prompt's digest
        for others in (long(request_id="moved", tenant="other"), long(request_id="moved", salt="other")):
            assert isinstance(await refusal(stub.GenerateOnce(resume_of(others, got))), Duplicate)
        live.cancel()

    run(services, test)


def test_a_resume_of_an_ended_answer_ends_at_once(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        request = long(max_tokens=20)
        got = await whole(stub, request)
        rest = await whole(stub, resume_of(request, got))
        assert rest.ids == [] and rest.text == ""
        assert rest.finished is not None and rest.finished.reason == pb.FINISH_REASON_LENGTH
        assert rest.finished.usage.generated_tokens == 20
        assert (await stub.GenerateOnce(resume_of(request, got))).finished.reason == pb.FINISH_REASON_LENGTH

    run(services, test)


# A chat.


def test_a_chat_of_ten_turns_computes_only_what_is_new(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        async with AsyncClient(services.executor_target) as client:
            chat = client.chat(system="You count.", options=Options(max_tokens=12))
            before = 0
            for turn in range(10):
                answer = await chat.ask(f"and {turn}?")
                usage = answer.finished.usage
                new = usage.prompt_tokens - before
                assert usage.computed_prompt_tokens <= new + BLOCK, (turn, usage)
                assert usage.cached_device_tokens + usage.computed_prompt_tokens == usage.prompt_tokens
                before = usage.prompt_tokens + usage.generated_tokens

    run(services, test)


# What it says about itself.


def test_model_info(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.context_tokens, info.vocabulary, info.block_tokens, info.pool_blocks) == (
            CONTEXT,
            512,
            BLOCK,
            POOL,
        )
        assert list(info.eos_token_ids) == [IM_END]
        assert info.has_chat_template and info.max_request_bytes == 1 << 20
        assert info.version and info.fingerprint and info.fingerprint_text

    run(services, test)


def test_status_explain_and_metrics(services: Supervisor, metrics_port: int) -> None:
    async def test(stub: Any) -> None:
        calls = [stub.Generate(long(80 + i, request_id=f"r{i}")) for i in range(ROWS)]
        await asyncio.gather(*(Collected().read(call, tokens=2) for call in calls))
        calls += [stub.Generate(long(90 + i, request_id=f"r{ROWS + i}")) for i in range(2)]
        while True:  # they wait, and a decision has said why
            now = await stub.GetStatus(pb.GetStatusRequest(history_steps=5))
            if now.num_waiting == sum(r.count for r in now.waiting_reasons) == 2:
                break
            await asyncio.sleep(0.01)
        assert now.num_running == ROWS
        assert now.scheduler_connected and now.cache_connected and not now.not_ready
        assert now.backend == (await stub.GetModelInfo(pb.GetModelInfoRequest())).backend != ""
        with urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        assert f'backend="{now.backend}"' in metrics
        assert re.search(rf'^vllm:num_requests_running\{{model_name=".+"\}} {ROWS}.0$', metrics, re.MULTILINE)
        assert len(now.history) == 5 and now.history[-1].rows == ROWS
        assert [s.step for s in now.history] == sorted(s.step for s in now.history)
        assert now.policy.name == "fcfs"
        running = await stub.ExplainRequest(pb.ExplainRequestRequest(request_id="r0"))
        waiting = await stub.ExplainRequest(pb.ExplainRequestRequest(request_id=f"r{ROWS + 1}"))
        assert running.explanation.state == "running" and running.history
        assert waiting.explanation.state == "waiting" and waiting.explanation.sentence
        assert isinstance(await refusal(stub.ExplainRequest(pb.ExplainRequestRequest(request_id="nobody"))), Missing)
        for call in calls:
            call.cancel()

    run(services, test)


def test_a_policy_is_tried_before_it_is_set(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        for name in ("", "no such policy"):
            policy = scheduler_pb2.PolicyChoice(name=name)
            assert isinstance(await refusal(stub.SetPolicy(pb.SetPolicyRequest(policy=policy))), InvalidRequest)
        answer = await stub.SetPolicy(pb.SetPolicyRequest(policy=scheduler_pb2.PolicyChoice(name="fcfs")))
        assert answer.from_step > 0
        assert (await whole(stub, long(max_tokens=10))).error is None

    run(services, test)


def test_a_learned_table_stays_when_the_policy_changes(services: Supervisor) -> None:
    async def test(stub: Any) -> None:
        stump = Trees(1, 0, np.array([0]), np.array([0]), np.array([1, 2]))
        content = write_table(LengthTable(stump, stump))
        wrong = scheduler_pb2.PolicyTable(name="lengths", digest=digest_of(b"x"), content=b"x")
        table = scheduler_pb2.PolicyTable(name="lengths", digest=digest_of(content), content=content)
        for tables in ([wrong], [table], []):
            policy = scheduler_pb2.PolicyChoice(name="sjf", tables=tables)
            call = stub.SetPolicy(pb.SetPolicyRequest(policy=policy))
            if tables == [wrong]:
                assert isinstance(await refusal(call), InvalidRequest)
            else:
                await call
                assert (await whole(stub, long(max_tokens=10))).error is None
        (kept,) = (await stub.GetStatus(pb.GetStatusRequest())).policy.tables
        assert kept.digest == table.digest and not kept.content
        await stub.SetPolicy(pb.SetPolicyRequest(policy=scheduler_pb2.PolicyChoice(name="fcfs")))

    run(services, test)
