"""The client library against a real gRPC server whose streams break where the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney import errors
from jitney.client import (
    NO_RETRY,
    AsyncClient,
    ChoiceEnd,
    Client,
    Delta,
    Event,
    Finished,
    FinishReason,
    Message,
    Options,
    RetryPolicy,
    Started,
    wire,
)
from jitney.client.received import Received
from jitney.client.wire import generate_request
from jitney.executor.v1 import executor_pb2 as pb
from jitney.scheduler.v1 import scheduler_pb2
from tests.support.scripted_executor import HINT, IDS, PIECES, TEXT, Break, InThread, ScriptedExecutor, serving

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
T = TypeVar("T")
QUICK = RetryPolicy(connect_s=5.0, resume_s=5.0, first_s=0.001, most_s=0.01)


def with_client(
    executor: ScriptedExecutor, work: Callable[[AsyncClient], Awaitable[T]], retry: RetryPolicy = QUICK
) -> T:
    """Serves the executor and hands a client of it to `work`."""

    async def run() -> T:
        async with serving(executor) as target, AsyncClient(target, retry=retry) as client:
            return await work(client)

    return asyncio.run(run())


async def events_of(client: AsyncClient, options: Options = Options()) -> list[Event]:  # noqa: B008
    return [event async for event in client.generate("to be", options)]


def shown(events: list[Event]) -> tuple[tuple[int, ...], str, int]:
    """Ids, text and the number of logprobs that a caller was shown."""
    deltas = [event for event in events if isinstance(event, Delta)]
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    return ids, "".join(delta.text for delta in deltas), sum(len(delta.logprobs) for delta in deltas)


def test_an_undisturbed_answer() -> None:
    executor = ScriptedExecutor()
    events = with_client(executor, events_of)
    first, last = events[0], events[-1]
    assert isinstance(first, Started)
    assert (first.seed, first.prompt_tokens, first.model_version) == (7, 5, "m")
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.cached_tokens, last.timings.ttft_us) == (FinishReason.STOP, 4, 2)
    assert shown(events) == (IDS, TEXT, len(IDS))
    assert executor.requests[0].request_id == first.request_id != ""
    assert executor.cancelled == 0


@pytest.mark.parametrize("after", range(len(IDS) + 1))
def test_a_stream_that_breaks_goes_on_and_shows_all_once(after: int) -> None:
    executor = ScriptedExecutor([Break(after, UNAVAILABLE)])
    events = with_client(executor, events_of)
    assert shown(events) == (IDS, TEXT, len(IDS))
    assert [type(event) for event in events].count(Started) == 1
    again = executor.requests[1]
    assert tuple(again.resume.token_ids) == IDS[:after]
    assert again.resume.hint == pb.ResumeHint(**HINT)  # type: ignore[arg-type]
    assert again.request_id == executor.requests[0].request_id


@settings(max_examples=40, deadline=None)
@given(
    breaks=st.lists(
        st.builds(
            Break,
            st.integers(0, len(IDS)),
            st.sampled_from([UNAVAILABLE, grpc.StatusCode.CANCELLED, None]),
            before_started=st.booleans(),
        ),
        max_size=5,
    ),
    lag=st.integers(0, 5),
    max_tokens=st.one_of(st.none(), st.integers(1, len(IDS))),
)
def test_however_often_and_wherever_it_breaks(breaks: list[Break], lag: int, max_tokens: int | None) -> None:
    executor = ScriptedExecutor(breaks, lag=lag)
    events = with_client(executor, lambda client: events_of(client, Options(max_tokens=max_tokens)))
    whole = with_client(ScriptedExecutor(), lambda client: events_of(client, Options(max_tokens=max_tokens)))
    assert shown(events) == shown(whole)
    assert events[-1] == whole[-1]


def test_a_completion_says_how_often_it_was_resumed() -> None:
    executor = ScriptedExecutor([Break(3, UNAVAILABLE), Break(2, UNAVAILABLE)], not_identical=True)
    done = with_client(executor, lambda client: client.generate("to be").result())
    assert (done.token_ids, done.text, done.resumed, done.not_identical) == (IDS, TEXT, 2, True)
    assert executor.requests[2].resume.hint.not_identical


def test_a_resume_asks_for_the_max_tokens_in_force() -> None:
    executor = ScriptedExecutor([Break(3, UNAVAILABLE)])
    with_client(executor, events_of)
    assert not executor.requests[0].HasField("max_tokens")
    assert executor.requests[1].max_tokens == len(IDS)


@pytest.mark.parametrize(
    "error",
    [
        errors.Aborted("another stream took over"),
        errors.InvalidRequest("no", field="top_p", limit=1, value=2),
        errors.Conflict("another model", field="model_version"),
        errors.TooLarge("queue is full", retry_after_us=5_000),
        errors.Expired("deadline"),
        errors.Missing("none"),
        errors.Duplicate("live already"),
        errors.JitneyError("internal"),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
def test_what_is_not_a_lost_connection_is_raised_as_it_is(error: errors.JitneyError, after: int) -> None:
    executor = ScriptedExecutor([Break(after, error=error)])
    with pytest.raises(type(error)) as caught:
        with_client(executor, events_of)
    assert (caught.value.message, caught.value.field) == (error.message, error.field)
    assert (caught.value.limit, caught.value.retry_after_us) == (error.limit, error.retry_after_us)
    assert len(executor.requests) == 1


def test_a_duplicate_is_waited_for_if_it_is_our_own_earlier_try() -> None:
    lost = Break(0, UNAVAILABLE, before_started=True)
    executor = ScriptedExecutor([lost, Break(0, error=errors.Duplicate("live"), before_started=True)])
    assert shown(with_client(executor, events_of))[0] == IDS
    assert len(executor.requests) == 3


def test_an_executor_that_never_comes_back_is_away() -> None:
    executor = ScriptedExecutor([Break(1, UNAVAILABLE)] + [Break(0, UNAVAILABLE, before_started=True)] * 10_000)
    retry = RetryPolicy(connect_s=0.0, resume_s=0.3, first_s=0.001, most_s=0.05)

    async def work(client: AsyncClient) -> tuple[tuple[int, ...], str]:
        answer = client.generate("to be")
        with pytest.raises(errors.Away):
            await answer.result()
        return answer.token_ids, answer.text

    assert with_client(executor, work, retry)[0] == IDS[:1]
    assert len(executor.requests) > 3


def test_without_retries_a_broken_stream_is_raised() -> None:
    executor = ScriptedExecutor([Break(2, UNAVAILABLE)])
    with pytest.raises(errors.Away):
        with_client(executor, events_of, NO_RETRY)
    assert len(executor.requests) == 1


def test_nobody_there() -> None:
    async def work() -> None:
        async with AsyncClient("127.0.0.1:1", retry=RetryPolicy(connect_s=0.2)) as client:
            with pytest.raises(errors.Away, match=r"no executor answers at 127\.0\.0\.1:1 \(Connection refused\)"):
                await client.model_info()
            with pytest.raises(errors.Away):
                await client.generate("x").result()

    asyncio.run(work())


def test_an_executor_that_is_killed_and_comes_back_on_its_port() -> None:
    async def run() -> None:
        first = ScriptedExecutor(pause_s=0.01)
        second = ScriptedExecutor()
        async with serving(first) as target:
            client = AsyncClient(target, retry=QUICK)
            answer = client.generate("to be")
            async for event in answer:
                if isinstance(event, Delta) and len(answer.token_ids) == 4:
                    break
        async with serving(second, int(target.rpartition(":")[2])):
            done = await answer.result()
        await client.aclose()
        assert (done.token_ids, done.text, done.resumed) == (IDS, TEXT, 1)
        assert len(second.requests[0].resume.token_ids) >= 4

    asyncio.run(run())


@pytest.mark.parametrize("after", [0, 1, 7, 20, 3 * len(IDS) - 4])
def test_several_answers_come_whole_over_a_broken_stream(after: int) -> None:
    executor = ScriptedExecutor(breaks=[Break(after, UNAVAILABLE), Break(5, UNAVAILABLE)])

    async def work(client: AsyncClient) -> None:
        answer = client.generate("to be", Options(n=3))
        events = [event async for event in answer]
        done = await answer.result()
        assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
        for choice, whole in enumerate(done.choices):
            assert whole.token_ids == IDS[: len(IDS) - choice]
            assert whole.text == "".join(PIECES[: len(IDS) - choice])
            shown = [event for event in events if isinstance(event, Delta) and event.choice == choice]
            assert tuple(token for event in shown for token in event.token_ids) == whole.token_ids
            assert "".join(event.text for event in shown) == whole.text
        assert [event.choice for event in events if isinstance(event, ChoiceEnd)] == [2, 1, 0]
        assert (done.token_ids, done.text, done.resumed) == (IDS, TEXT, min(2, len(executor.requests) - 1))
        assert (answer.token_ids, answer.text) == (IDS, TEXT)

    with_client(executor, work)
    assert all(request.n == 3 for request in executor.requests)


def test_a_turn_of_a_chat_has_one_answer() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(errors.InvalidRequest, match="n = 2"):
        client.chat(options=Options(n=2)).send("hello")


def test_deadlines_shrink_with_the_time_that_passed() -> None:
    received = Received(generate_request("x", Options(ttft_deadline_ms=500, deadline_ms=1000), "id"))
    assert received.next_request(0).deadline_ms == 1000
    again = received.next_request(400)
    assert (again.ttft_deadline_ms, again.deadline_ms) == (100, 600)
    received.take(pb.GenerateEvent(started=pb.Started(request_id="id", max_tokens=9)))
    received.take(pb.GenerateEvent(delta=pb.Delta(token_ids=[1])))
    late = received.next_request(700)
    assert (late.HasField("ttft_deadline_ms"), late.deadline_ms) == (False, 300)
    with pytest.raises(errors.Expired) as caught:
        received.next_request(1000)
    assert (caught.value.field, caught.value.limit) == ("deadline_ms", "1000")


def test_leaving_early_cancels_the_stream() -> None:
    executor = ScriptedExecutor(pause_s=0.005)

    async def work(client: AsyncClient) -> None:
        async with client.generate("to be") as answer:
            async for event in answer:
                if isinstance(event, Delta):
                    break
        for _ in range(200):
            if executor.cancelled:
                return
            await asyncio.sleep(0.01)

    with_client(executor, work)
    assert executor.cancelled == 1


def test_cancelling_the_reading_task_cancels_the_stream() -> None:
    executor = ScriptedExecutor(pause_s=0.005)

    async def work(client: AsyncClient) -> None:
        task = asyncio.create_task(events_of(client))
        while not executor.requests:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            if executor.cancelled:
                return
            await asyncio.sleep(0.01)

    with_client(executor, work)
    assert executor.cancelled == 1


def test_abort_ends_the_answer() -> None:
    executor = ScriptedExecutor(pause_s=0.005)

    async def work(client: AsyncClient) -> FinishReason:
        answer = client.generate("to be", request_id="mine")
        async for event in answer:
            if isinstance(event, Delta):
                await answer.abort()
                break
        done = await answer.result()
        return done.finished.reason

    assert with_client(executor, work) is FinishReason.ABORTED
    assert executor.aborted == ["mine"]


def test_an_answer_that_is_not_wanted_any_more_is_not_taken_up() -> None:
    executor = ScriptedExecutor([Break(3, UNAVAILABLE)])

    async def work(client: AsyncClient) -> None:
        answer = client.generate("to be")
        await anext(answer)
        await answer.abort()
        with pytest.raises(errors.Aborted):
            await answer.result()

    executor.aborts = False
    with_client(executor, work)
    assert len(executor.requests) == 1


def test_reasons_of_a_newer_contract_are_no_error() -> None:
    assert wire.finish_reason(99) is FinishReason.UNSPECIFIED
    counts = [scheduler_pb2.ReasonCount(reason=77, count=2)]  # type: ignore[arg-type]
    assert wire.status(pb.GetStatusResponse(waiting_reasons=counts)).waiting_reasons == {"77": 2}


def test_a_chat_sends_back_the_ids_that_were_generated() -> None:
    executor = ScriptedExecutor([Break(3, UNAVAILABLE)])

    async def work(client: AsyncClient) -> list[Message]:
        chat = client.chat("Be brief.")
        await chat.ask("first")
        await chat.ask("second")
        return chat.messages

    messages = with_client(executor, work)
    assert [message.role for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    sent = executor.requests[-1].chat.messages
    assert [message.content for message in sent] == ["Be brief.", "first", TEXT, "second"]
    assert tuple(sent[2].token_ids) == IDS


def test_a_turn_that_failed_leaves_no_trace() -> None:
    executor = ScriptedExecutor([Break(3, error=errors.Aborted("by the test"))])

    async def work(client: AsyncClient) -> list[Message]:
        chat = client.chat()
        with pytest.raises(errors.Aborted):
            await chat.ask("first")
        assert chat.messages == []
        await chat.ask("first")
        return chat.messages

    assert with_client(executor, work)[0] == Message("user", "first")


def test_unary_calls_are_tried_again() -> None:
    executor = ScriptedExecutor(unary_failures=2)
    done = with_client(executor, lambda client: client.generate_once([1, 2, 3], Options(logprobs=1)))
    assert (done.token_ids, done.text, len(done.logprobs)) == (IDS, TEXT, len(IDS))
    assert [tuple(request.token_ids.ids) for request in executor.requests] == [(1, 2, 3)] * 3
    info = with_client(executor, lambda client: client.model_info())
    assert (info.name, info.eos_token_ids) == ("scripted", (2,))


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([1, -1], Options(), "token_ids"),
        ([1, 2**32], Options(), "token_ids"),
        ([1, "a"], Options(), "token_ids"),
        ([Message("user", "hi"), 3], Options(), "prompt"),
        ([Message("user", "hi", [-1])], Options(), "token_ids"),
        ("\ud800", Options(), "text"),
        ("x", Options(max_tokens=2**31), "max_tokens"),
        ("x", Options(seed=-1), "seed"),
        ("x", Options(stop=["\ud800"]), "stop"),
        ("x", Options(stop_token_ids=[-5]), "stop_token_ids"),
        ("x", Options(priority=1.5), "priority"),  # type: ignore[arg-type]
    ],
)
def test_what_a_message_cannot_hold_is_refused_at_once(prompt: object, options: Options, field: str) -> None:
    client = AsyncClient("127.0.0.1:1")
    with pytest.raises(errors.InvalidRequest) as caught:
        client.generate(prompt, options)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_every_option_arrives() -> None:
    options = Options(
        max_tokens=9, temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, seed=2**63, stop=["a", "b"],
        stop_token_ids=[3], ignore_eos=True, logprobs=0, n=3, priority=-5, tenant="t", endpoint="e", salt="s",
        ttft_deadline_ms=8, deadline_ms=9, return_prompt_token_ids=True,
    )  # fmt: skip
    request = generate_request([Message("assistant", "hi", [5])], options, "id")
    assert request == pb.GenerateRequest(
        request_id="id",
        chat=pb.Chat(messages=[pb.ChatMessage(role="assistant", content="hi", token_ids=[5])]),
        sampling=pb.Sampling(temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, seed=2**63),
        max_tokens=9, stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, logprobs=0, n=3, priority=-5, tenant="t",
        endpoint="e", salt="s", ttft_deadline_ms=8, deadline_ms=9, return_prompt_token_ids=True,
    )  # fmt: skip
    assert generate_request([], Options(), "id").WhichOneof("prompt") == "token_ids"


def test_the_blocking_client_does_the_same() -> None:
    executor = ScriptedExecutor([Break(2, UNAVAILABLE), Break(5, UNAVAILABLE)])
    with InThread(executor) as target, Client(target, retry=QUICK) as client:
        answer = client.generate("to be")
        assert shown(list(answer)) == (IDS, TEXT, len(IDS))
        assert (answer.resumed, answer.finished and answer.finished.reason) == (2, FinishReason.STOP)
        assert "".join(client.generate("to be").texts()) == TEXT
        assert client.generate("to be").result().token_ids == IDS
        assert client.generate_once("to be").text == TEXT
        assert client.model_info().name == "scripted"
        chat = client.chat()
        assert chat.ask("hello").text == TEXT
        assert [message.role for message in chat.messages] == ["user", "assistant"]
        with pytest.raises(errors.InvalidRequest):
            client.generate([-1])


def test_the_blocking_client_cancels_what_it_leaves() -> None:
    executor = ScriptedExecutor(pause_s=0.01)
    with InThread(executor) as target:
        with Client(target) as client, client.generate("to be") as answer:
            next(iter(answer))
        with Client(target) as client:
            next(iter(client.generate("to be")))
        assert executor.requests
    assert executor.cancelled == 2
