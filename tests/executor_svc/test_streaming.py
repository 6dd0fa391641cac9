"""How answers reach readers that are slow, late or gone: the real service on a real connection, an engine that the
test plays itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from executor_svc import wire
from executor_svc.door import Door
from executor_svc.engine import EngineStatus
from executor_svc.limits import Limits
from executor_svc.model_info import ModelInfo
from executor_svc.request import Answer, Finish, FinishReason, Submission, TokenLogprobs
from executor_svc.server import DOOR_THREADS, ExecutorService, Parts
from executor_svc.situation import Reads
from executor_svc.streaming import Bells, Cursor
from executor_svc.tokenizer import Tokenizer, load_tokenizer
from jitney.block_ops import ChainHits
from jitney.errors import Away, JitneyError, Missing, TooLarge
from jitney.executor.v1 import executor_pb2 as pb
from jitney.executor.v1 import executor_pb2_grpc
from jitney.keys import Key
from jitney.scheduler.v1 import scheduler_pb2
from jitney.serving.calls import CallInterceptor, Gate
from jitney.serving.status import from_rpc_error
from jitney.snapshot import PolicyChoice, Snapshot
from tests.support.tiny_llama import make_tiny_llama

INFO = ModelInfo("tiny", "v", b"f", "", 512, 512, 16, 64, 1, "none", "none", True, 1)


@dataclass
class PlayedEngine:
    """Keeps what was submitted; the test appends to the answers and rings."""

    answers: list[Answer] = field(default_factory=list)
    rings: list[Callable[[], None]] = field(default_factory=list)
    submitted: list[Submission] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    snapshot: Snapshot | None = None

    def __post_init__(self) -> None:
        self.hold.set()

    def submit(self, choices: Sequence[Submission], on_change: Callable[[], None]) -> list[Answer]:
        self.hold.wait(10)
        for submission in choices:
            self.submitted.append(submission)
            self.answers.append(Answer(submission.client_id, len(self.answers) + 1))
            self.rings.append(on_change)
        return self.answers[-len(choices) :]

    def abort(self, client_id: str) -> None:
        raise Missing("none", field="request_id")

    def abort_rows(self, ids: Collection[int]) -> None:
        self.gone.extend(sorted(ids))

    def status(self, history_steps: int = 0) -> EngineStatus:
        raise JitneyError("not asked for here")

    def explain(self, client_id: str) -> tuple[int, Snapshot | None, list[str]]:
        return 1, self.snapshot, ["arrived"]

    def set_policy(self, choice: PolicyChoice, reads: Reads | None = None) -> int:
        return 1

    async def answer(self, index: int = 0) -> Answer:
        """The answer of a request, once it is there."""
        while len(self.answers) <= index:
            await asyncio.sleep(0.005)
        return self.answers[index]

    def say(self, index: int, ids: list[int], text: str = "", finish: FinishReason | None = None) -> None:
        """More of an answer, as the loop would append it."""
        answer = self.answers[index]
        answer.token_ids.extend(ids)
        if text:
            answer.texts.append(text)
        if finish is not None:
            answer.finish = Finish(finish, message="as the test wants it")
        self.rings[index]()


class PlayedAdvice:
    """A scheduler that answers as the test says."""

    error: JitneyError | None = None

    async def explain(self, snapshot: Snapshot, request_id: int) -> scheduler_pb2.Explanation:
        if self.error is not None:
            raise self.error
        return scheduler_pb2.Explanation(state="running")

    async def try_policy(self, choice: PolicyChoice) -> Reads | None:
        if self.error is not None:
            raise self.error
        return None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_tiny_llama(Path(tmp_path_factory.mktemp("tiny"))))


class PlayedCache:
    """Has the first block of every chain on the device, and the second on the SSD."""

    async def find(self, keys: Sequence[Key]) -> ChainHits:
        return ChainHits(device_blocks=min(1, len(keys)), ssd_blocks=min(1, max(0, len(keys) - 1)))


@dataclass
class Rig:
    engine: PlayedEngine
    advice: PlayedAdvice
    service: ExecutorService
    stub: Any
    gate: Gate


@contextlib.asynccontextmanager
async def rig(tokenizer: Tokenizer, *, opened: bool = True, reader_timeout_s: float = 30.0) -> AsyncIterator[Rig]:
    engine, advice, limits, gate = PlayedEngine(), PlayedAdvice(), Limits(reader_timeout_s=reader_timeout_s), Gate()
    service = ExecutorService(limits)
    info = wire.model_info(INFO, tokenizer, limits)
    parts = Parts(engine, Door(tokenizer, INFO, limits), advice, info, PlayedCache())
    if opened:
        service.open(parts)
    server = grpc.aio.server(interceptors=[CallInterceptor(gate)])
    executor_pb2_grpc.add_ExecutorServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    try:
        async with (
            asyncio.timeout(30),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel,
        ):
            yield Rig(engine, advice, service, executor_pb2_grpc.ExecutorStub(channel), gate)
    finally:
        await server.stop(0)
        service.close()


def asked(**more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), **more)


async def gone(rig: Rig, count: int = 1) -> None:
    while len(rig.engine.gone) < count:
        await asyncio.sleep(0.005)


def test_a_late_reader_gets_everything_at_once(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with rig(tokenizer) as r:
            call = r.stub.Generate(asked())
            assert (await call.read()).started.prompt_tokens == 3
            await r.engine.answer()
            r.engine.say(0, [1, 2, 3], "ab")
            r.engine.say(0, [4], "c")
            r.engine.say(0, [5], "d", FinishReason.LENGTH)
            deltas = []
            while (event := await call.read()).WhichOneof("event") == "delta":
                deltas.append(event.delta)
            assert [i for d in deltas for i in d.token_ids] == [1, 2, 3, 4, 5]
            assert "".join(d.text for d in deltas) == "abcd"
            assert len(deltas) <= 3
            assert event.finished.reason == pb.FINISH_REASON_LENGTH
            assert await call.read() is grpc.aio.EOF
            assert r.engine.gone == []

    asyncio.run(main())


def test_choices_end_one_by_one_and_the_request_with_the_last(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with rig(tokenizer) as r:
            call = r.stub.Generate(asked(n=3))
            await call.read()
            await r.engine.answer(2)
            assert [submission.choice for submission in r.engine.submitted] == [0, 1, 2]
            r.engine.say(1, [4, 5], "x", FinishReason.STOP)
            assert (await call.read()).delta == pb.Delta(token_ids=[4, 5], text="x", choice=1)
            end = (await call.read()).choice_end
            assert (end.choice, end.reason) == (1, pb.FINISH_REASON_STOP)
            r.engine.say(2, [6], "y", FinishReason.DEADLINE)
            r.engine.say(0, [7], "z", FinishReason.LENGTH)
            rest = [event async for event in call_events(call)]
            assert sorted(e.choice_end.choice for e in rest if e.HasField("choice_end")) == [0, 2]
            assert rest[-1].finished.reason == pb.FINISH_REASON_DEADLINE  # not every one came to its own end
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert r.engine.gone == []

    asyncio.run(main())


async def call_events(call: Any) -> AsyncIterator[pb.GenerateEvent]:
    """Those before a stream's end or error."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (event := await call.read()) is not grpc.aio.EOF:
            yield event


def test_one_cancel_ends_the_choices_that_live(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with rig(tokenizer) as r:
            call = r.stub.Generate(asked(n=3))
            await call.read()
            await r.engine.answer(2)
            r.engine.say(1, [4, 5], "x", FinishReason.STOP)
            await call.read()
            call.cancel()
            await gone(r, 2)
            assert r.engine.gone == [1, 3]

    asyncio.run(main())


def test_resumed_choices_that_had_ended_run_no_more(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with rig(tokenizer) as r:
            call = r.stub.Generate(asked(n=2, max_tokens=3, return_prompt_token_ids=True))
            hint = (await call.read()).started.hint
            call.cancel()
            await gone(r, 2)
            came = [pb.ResumeChoice(token_ids=[70, 71, 72]), pb.ResumeChoice(token_ids=[70])]
            again = asked(n=2, max_tokens=3, resume=pb.Resume(hint=hint, choices=came))
            call = r.stub.Generate(again)
            await call.read()
            text = (await call.read()).delta
            end = (await call.read()).choice_end
            assert (text.choice, text.text) == (0, tokenizer.decode([70, 71, 72]))
            assert (end.choice, end.reason, end.generated_tokens) == (0, pb.FINISH_REASON_LENGTH, 3)
            await r.engine.answer(2)
            (left,) = r.engine.submitted[2:]
            assert (left.choice, tuple(left.resumed_ids)) == (1, (70,))
            call.cancel()
            await gone(r, 3)

    asyncio.run(main())


def test_ids_come_before_their_text(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with rig(tokenizer) as r:
            call = r.stub.Generate(asked())
            await call.read()
            await r.engine.answer()
            r.engine.say(0, [1, 2])
            assert list((await call.read()).delta.token_ids) == [1, 2]
            r.engine.say(0, [], "held back so far")
            assert (await call.read()).delta == pb.Delta(text="held back so far")
            call.cancel()
            await gone(r)

    asyncio.run(main())


def test_a_reader_that_takes_nothing_is_ended(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with rig(tokenizer, reader_timeout_s=0.3) as r:
            slow = r.stub.Generate(asked(request_id="slow"))
            await slow.read()
            other = r.stub.Generate(asked(request_id="other"))
            await other.read()
            while not r.engine.gone:  # far more than the connection takes without a reader
                r.engine.say(0, [1], "x" * 65536)
                await asyncio.sleep(0.005)
            assert r.engine.gone == [1]
            r.engine.say(1, [1], "y", FinishReason.LENGTH)
            assert (await other.read()).delta.text == "y"
            assert (await other.read()).finished.reason == pb.FINISH_REASON_LENGTH
            texts = 0
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while True:
                    texts += len((await slow.read()).delta.text)
            error = from_rpc_error(caught.value)
            assert isinstance(error, TooLarge) and (error.field, error.limit) == ("stream", "0.3 s")
            assert texts > 0

    asyncio.run(main())


def test_an_executor_that_stops_sends_no_finish(tokenizer: Tokenizer) -> None:
    """So that the client resumes elsewhere."""

    async def main() -> None:
        async with rig(tokenizer) as r:
            call = r.stub.Generate(asked())
            await call.read()
            await r.engine.answer()
            r.engine.say(0, [1], "a", FinishReason.ERROR)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while True:
                    assert (await call.read()).WhichOneof("event") != "finished"
            assert isinstance(from_rpc_error(caught.value), Away)

    asyncio.run(main())


@pytest.mark.parametrize(
    "reason, code",
    [
        (FinishReason.ABORTED, grpc.StatusCode.ABORTED),
        (FinishReason.DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
        (FinishReason.REFUSED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_what_did_not_end_by_itself_has_a_status_too(
    tokenizer: Tokenizer, reason: FinishReason, code: grpc.StatusCode
) -> None:
    async def main() -> None:
        async with rig(tokenizer) as r:
            stream, unary = r.stub.Generate(asked()), r.stub.GenerateOnce(asked())
            await r.engine.answer(1)
            for index in range(2):
                r.engine.say(index, [1], "", reason)
            events = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while True:
                    events.append(await stream.read())
            assert events[-1].finished.reason == reason
            assert caught.value.code() is code
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unary
            assert caught.value.code() is code and caught.value.details() == "as the test wants it"

    asyncio.run(main())


@pytest.mark.parametrize("unary", [False, True])
def test_a_client_that_goes_while_it_is_let_in(tokenizer: Tokenizer, unary: bool) -> None:
    async def main() -> None:
        async with rig(tokenizer) as r:
            r.engine.hold.clear()
            call = r.stub.GenerateOnce(asked()) if unary else r.stub.Generate(asked())
            await asyncio.sleep(0.2)
            call.cancel()
            while r.gate.running:
                await asyncio.sleep(0.005)
            r.engine.hold.set()
            await gone(r)
            assert r.engine.gone == [1]

    asyncio.run(main())


def test_two_hundred_streams_leave_nothing_behind(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with rig(tokenizer) as r:
            await asyncio.gather(*(_cancelled(r) for _ in range(4)))
            threads, tasks = threading.active_count(), len(asyncio.all_tasks())
            await asyncio.gather(*(_cancelled(r) for _ in range(200)))
            while r.gate.running or len(asyncio.all_tasks()) > tasks:
                await asyncio.sleep(0.01)
            assert threading.active_count() <= threads + DOOR_THREADS
            assert sorted(r.engine.gone) == list(range(1, 205))

    asyncio.run(main())


async def _cancelled(r: Rig) -> None:
    call = r.stub.Generate(asked())
    await call.read()
    call.cancel()
    while not call.done():
        await asyncio.sleep(0.005)


def test_nothing_is_served_before_the_model_is_there(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with rig(tokenizer, opened=False) as r:
            for call in (
                r.stub.GenerateOnce(asked()),
                r.stub.GetModelInfo(pb.GetModelInfoRequest()),
                r.stub.Abort(pb.AbortRequest(request_id="x")),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                error = from_rpc_error(caught.value)
                assert isinstance(error, Away) and error.retry_after_us > 0

    asyncio.run(main())


def test_explaining_without_a_scheduler(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with rig(tokenizer) as r:
            request = pb.ExplainRequestRequest(request_id="x")
            first = await r.stub.ExplainRequest(request)
            assert "no scheduler was asked yet" in first.explanation.sentence
            r.engine.snapshot = Snapshot()
            assert (await r.stub.ExplainRequest(request)).explanation.state == "running"
            r.advice.error = Away("all are away")
            third = await r.stub.ExplainRequest(request)
            assert "all are away" in third.explanation.sentence and list(third.history) == ["arrived"]
            r.advice.error = Missing("not in the snapshot")
            assert "after the last snapshot" in (await r.stub.ExplainRequest(request)).explanation.sentence

    asyncio.run(main())


# Cursor and bells by themselves.


def test_a_cursor_gives_each_token_with_its_logprob() -> None:
    answer = Answer("x", 1)
    cursor = Cursor(answer, with_logprobs=True)
    answer.token_ids.append(1)
    assert cursor.next(False) == ([], [], "")  # its log-probability is still to come
    answer.logprobs.append(TokenLogprobs(-1.0))
    answer.token_ids.append(2)
    assert cursor.next(False) == ([1], [TokenLogprobs(-1.0)], "")
    answer.logprobs += [TokenLogprobs(-2.0), TokenLogprobs(-3.0)]
    assert cursor.next(False) == ([2], [TokenLogprobs(-2.0)], "")  # the next token is still to come
    answer.token_ids += [3, 4]
    assert cursor.next(False) == ([3], [TokenLogprobs(-3.0)], "")
    answer.texts.append("a")
    assert cursor.next(True) == ([4], [], "a")
    assert cursor.next(True) == ([], [], "")


def test_two_cursors_do_not_disturb_each_other() -> None:
    answer = Answer("x", 1)
    first, second = Cursor(answer, False), Cursor(answer, False)
    answer.token_ids += [1, 2]
    assert first.next(False)[0] == [1, 2]
    answer.token_ids.append(3)
    assert (first.next(False)[0], second.next(False)[0]) == ([3], [1, 2, 3])


def test_bells_ring_from_any_thread_and_never_get_lost() -> None:
    async def main() -> None:
        bells, bell, said = Bells(asyncio.get_running_loop()), asyncio.Event(), [0]

        def ring() -> None:
            for _ in range(2000):
                said[0] += 1
                bells.ring(bell)

        thread = threading.Thread(target=ring)
        thread.start()
        heard = 0
        async with asyncio.timeout(20):
            while heard < 2000:
                bell.clear()
                heard = said[0]
                if heard < 2000:
                    await bell.wait()
        thread.join()

    asyncio.run(main())


def test_a_bell_of_a_closed_loop_is_silent() -> None:
    loop = asyncio.new_event_loop()
    bells = Bells(loop)
    loop.close()
    bells.ring(asyncio.Event())
    bells.ring(asyncio.Event())
