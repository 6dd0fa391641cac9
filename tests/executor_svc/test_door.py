"""The door: every bad input is one typed error with field, limit and value; what fits exactly is let in."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.door import Door, Entry
from executor_svc.limits import Limits
from executor_svc.model_info import ModelInfo
from executor_svc.request import FinishReason
from executor_svc.tokenizer import Tokenizer, load_tokenizer
from jitney.errors import Conflict, InvalidRequest, JitneyError, TooLarge
from jitney.executor.v1 import executor_pb2 as pb
from tests.support.tiny_llama import IM_END, make_tiny_llama

VOCABULARY, CONTEXT, BLOCK, POOL = 512, 128, 16, 6
Request = pb.GenerateRequest
INFO = ModelInfo(
    name="tiny",
    version="v1",
    fingerprint=b"f" * 32,
    fingerprint_text="",
    context_tokens=CONTEXT,
    vocabulary=VOCABULARY,
    block_tokens=BLOCK,
    pool_blocks=64,
    block_bytes=1,
    backend="none",
    arithmetic="none",
    bit_invariant=True,
    row_multiple=1,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def door(tokenizer: Tokenizer) -> Door:
    return Door(tokenizer, INFO, draw_seed=lambda: 42, draw_id=lambda: "drawn")


@pytest.fixture(scope="module")
def small(tokenizer: Tokenizer) -> Door:
    """A pool that holds less than the context."""
    return Door(tokenizer, dataclasses.replace(INFO, pool_blocks=POOL))


def ids(count: int, **more: Any) -> pb.GenerateRequest:
    """A prompt of so many tokens."""
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5 + i % 400 for i in range(count)]), **more)


def chat(*messages: tuple[str, str]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=r, content=c) for r, c in messages])


def sampling(**fields: Any) -> pb.GenerateRequest:
    return ids(3, sampling=pb.Sampling(**fields))


BAD: list[tuple[str, pb.GenerateRequest, str, str, str]] = [  # name, request, field, limit, value
    ("no prompt", Request(), "prompt", "text, token_ids or chat", "none"),
    ("empty text", Request(text=""), "text", "at least 1 token", "0 bytes"),
    ("empty ids", ids(0), "token_ids", "at least 1 token", "0"),
    ("no messages", Request(chat=pb.Chat()), "chat.messages", "at least 1", "0"),
    ("id over the vocabulary", Request(token_ids=pb.TokenIds(ids=[1, 512])), "token_ids.ids[1]", "0 to 511", "512"),
    ("huge id", Request(token_ids=pb.TokenIds(ids=[2**32 - 1])), "token_ids.ids[0]", "0 to 511", str(2**32 - 1)),
    ("over-long text", Request(text="ab " * 100_000), "text", "127", "at least 23076"),
    ("max_tokens 0", ids(3, max_tokens=0), "max_tokens", "at least 1", "0"),
    ("max_tokens -1", ids(3, max_tokens=-1), "max_tokens", "at least 1", "-1"),
    ("max_tokens -2^31", ids(3, max_tokens=-(2**31)), "max_tokens", "at least 1", "-2147483648"),
    ("max_tokens 2^31-1", ids(3, max_tokens=2**31 - 1), "max_tokens", "125", "2147483647"),
    ("max_tokens 0 with stop", ids(3, max_tokens=0, stop=["x"]), "max_tokens", "at least 1", "0"),
    ("prompt of the context", ids(CONTEXT), "prompt", "127", "128"),
    ("prompt over the context", ids(CONTEXT + 1, max_tokens=1), "prompt", "127", "129"),
    # By their number alone: looking at millions of ids one by one would hold up everyone else.
    ("more ids than the context", Request(token_ids=pb.TokenIds(ids=[9999] * 200)), "prompt", "127", "200"),
    (
        "more resumed ids than the context",
        ids(3, resume=pb.Resume(token_ids=[999] * 200)),
        "resume.token_ids",
        "128",
        "200",
    ),
    (
        "more ids in a chat than the context",
        Request(chat=pb.Chat(messages=[pb.ChatMessage(role="assistant", token_ids=[9999] * 70)] * 2)),
        "prompt",
        "127",
        "140",
    ),
    ("sum over the context", ids(CONTEXT - 1, max_tokens=2), "max_tokens", "1", "2"),
    ("temperature -1", sampling(temperature=-1), "sampling.temperature", "[0, 100]", "-1"),
    ("temperature NaN", sampling(temperature=math.nan), "sampling.temperature", "[0, 100]", "nan"),
    ("temperature inf", sampling(temperature=math.inf), "sampling.temperature", "[0, 100]", "inf"),
    ("temperature 100.5", sampling(temperature=100.5), "sampling.temperature", "[0, 100]", "100.5"),
    ("top_p 0", sampling(top_p=0), "sampling.top_p", "(0, 1]", "0"),
    ("top_p 1.1", sampling(top_p=1.1), "sampling.top_p", "(0, 1]", "1.1"),
    ("top_p NaN", sampling(top_p=math.nan), "sampling.top_p", "(0, 1]", "nan"),
    ("top_k -1", sampling(top_k=-1), "sampling.top_k", "0 to 2147483647", "-1"),
    ("min_p -0.1", sampling(min_p=-0.1), "sampling.min_p", "[0, 1]", "-0.1"),
    ("min_p 2", sampling(min_p=2), "sampling.min_p", "[0, 1]", "2"),
    ("min_p NaN", sampling(min_p=math.nan), "sampling.min_p", "[0, 1]", "nan"),
    ("n 33", ids(3, n=33), "n", "0 to 32", "33"),
    ("n -1", ids(3, n=-1), "n", "0 to 32", "-1"),
    ("n 2^31-1", ids(3, n=2**31 - 1), "n", "0 to 32", "2147483647"),
    ("repetition", sampling(repetition_penalty=1.1), "sampling.repetition_penalty", "1", "1.1"),
    ("presence", sampling(presence_penalty=0.5), "sampling.presence_penalty", "0", "0.5"),
    ("frequency NaN", sampling(frequency_penalty=math.nan), "sampling.frequency_penalty", "0", "nan"),
    ("logit bias", sampling(logit_bias={5: 1.0}), "sampling.logit_bias", "0", "1"),
    ("logprobs 21", ids(3, logprobs=21), "logprobs", "0 to 20", "21"),
    ("logprobs -1", ids(3, logprobs=-1), "logprobs", "0 to 20", "-1"),
    ("17 stops", ids(3, stop=["x"] * 17), "stop", "16", "17"),
    ("empty stop", ids(3, stop=["x", ""]), "stop[1]", "at least 1 byte", "0 bytes"),
    ("long stop", ids(3, stop=["é" * 129]), "stop[0]", "256 bytes", "258 bytes"),
    ("65 stop ids", ids(3, stop_token_ids=[1] * 65), "stop_token_ids", "64", "65"),
    ("foreign stop id", ids(3, stop_token_ids=[600]), "stop_token_ids[0]", "0 to 511", "600"),
    ("priority 101", ids(3, priority=101), "priority", "-100 to 100", "101"),
    ("priority -101", ids(3, priority=-101), "priority", "-100 to 100", "-101"),
    ("long id", ids(3, request_id="x" * 129), "request_id", "128 bytes", "129 bytes"),
    ("huge id text", ids(3, request_id="é" * 1_000_000), "request_id", "128 bytes", "2000000 bytes"),
    ("id with a bell", ids(3, request_id="a\x07"), "request_id", "printable UTF-8", r"'a\x07'"),
    ("long tenant", ids(3, tenant="t" * 65), "tenant", "64 bytes", "65 bytes"),
    ("tenant with a line end", ids(3, tenant="a\nb"), "tenant", "printable UTF-8", r"'a\nb'"),
    ("tenant with NUL", ids(3, tenant="\0"), "tenant", "printable UTF-8", r"'\x00'"),
    ("tenant that turns text round", ids(3, tenant="a\u202eb"), "tenant", "printable UTF-8", r"'a\u202eb'"),
    ("endpoint with a tab", ids(3, endpoint="\t"), "endpoint", "printable UTF-8", r"'\t'"),
    ("long endpoint", ids(3, endpoint="質" * 22), "endpoint", "64 bytes", "66 bytes"),
    ("long salt", ids(3, salt="s" * 257), "salt", "256 bytes", "257 bytes"),
    ("ttft deadline 0", ids(3, ttft_deadline_ms=0), "ttft_deadline_ms", "1 to 604800000", "0"),
    ("deadline -1", ids(3, deadline_ms=-1), "deadline_ms", "1 to 604800000", "-1"),
    ("deadline 2^62", ids(3, deadline_ms=2**62), "deadline_ms", "1 to 604800000", str(2**62)),
    (
        "unknown role",
        Request(chat=chat(("user", "a"), ("tool", "b"))),
        "chat.messages[1].role",
        "system, user, assistant",
        "'tool'",
    ),
    (
        "role in capitals",
        Request(chat=chat(("User", "a"))),
        "chat.messages[0].role",
        "system, user, assistant",
        "'User'",
    ),
    (
        "ids of a user",
        Request(chat=pb.Chat(messages=[pb.ChatMessage(role="user", token_ids=[1])])),
        "chat.messages[0].token_ids",
        "role assistant",
        "user",
    ),
    (
        "foreign ids of an assistant",
        Request(chat=pb.Chat(messages=[pb.ChatMessage(role="assistant", token_ids=[1, 999])])),
        "chat.messages[0].token_ids[1]",
        "0 to 511",
        "999",
    ),
    ("resume without a hint", ids(3, resume=pb.Resume()), "resume.hint", "the hint of the broken stream", "none"),
    ("resume with a foreign id", ids(3, resume=pb.Resume(token_ids=[512])), "resume.token_ids[0]", "0 to 511", "512"),
]


@pytest.mark.parametrize("request_, field, limit, value", [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_a_typed_error(
    door: Door, request_: pb.GenerateRequest, field: str, limit: str, value: str
) -> None:
    """Cases 41, 42 and 43 among them."""
    with pytest.raises(InvalidRequest) as caught:
        door.admit(request_)
    error = caught.value
    assert (error.field, error.limit, error.value) == (field, limit, value)
    assert error.message and "\n" not in error.message and len(error.message) < 300


def test_the_rest_of_a_request_does_not_matter_to_a_bad_part(door: Door) -> None:
    """An empty prompt is refused whatever else is asked (case 41), max_tokens 0 too (case 42)."""
    for bad in (Request(text="", max_tokens=1, stop=["x"], n=1), Request(text="a", max_tokens=0, n=1, stop=["x"])):
        with pytest.raises(InvalidRequest):
            door.admit(bad)


def test_a_message_over_the_limit(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer, INFO, Limits(request_bytes=1000))
    assert door.admit(Request(text="x" * 100)).started.prompt_tokens < CONTEXT
    with pytest.raises(TooLarge, match="at most 1000") as caught:
        door.admit(Request(text="x" * 1000))
    assert (caught.value.field, caught.value.limit, caught.value.value) == ("request", "1000", "1003")


# What fits, exactly (case 43, and case 1 of the pool).


@pytest.mark.parametrize("prompt, asked", [(CONTEXT - 1, 1), (1, CONTEXT - 1), (CONTEXT - 7, 7)])
def test_prompt_and_answer_may_fill_the_context(door: Door, prompt: int, asked: int) -> None:
    entry = door.admit(ids(prompt, max_tokens=asked))
    assert (entry.started.prompt_tokens, entry.started.max_tokens) == (prompt, asked)
    with pytest.raises(InvalidRequest, match=f"{prompt} \\+ max_tokens {asked + 1} = {CONTEXT + 1} .* {CONTEXT}"):
        door.admit(ids(prompt, max_tokens=asked + 1))


@pytest.mark.parametrize("prompt", [1, 100, CONTEXT - 1])
def test_absent_max_tokens_means_what_is_left_of_the_context(door: Door, prompt: int) -> None:
    assert door.admit(ids(prompt)).choices[0].submission.max_tokens == CONTEXT - prompt


def test_absent_max_tokens_means_what_is_left_of_the_pool(small: Door) -> None:
    assert small.admit(ids(10)).choices[0].submission.max_tokens == POOL * BLOCK - 10


@pytest.mark.parametrize(
    "prompt, asked, needed",
    [
        (POOL * BLOCK, None, POOL + 1),
        (POOL * BLOCK + 1, None, POOL + 1),
        (POOL * BLOCK - 1, 2, POOL + 1),
        (BLOCK, (POOL - 1) * BLOCK + 1, POOL + 1),
        (BLOCK, CONTEXT - BLOCK, CONTEXT // BLOCK),
    ],
)
def test_what_the_pool_can_never_hold_is_refused_with_both_counts(
    small: Door, prompt: int, asked: int | None, needed: int
) -> None:
    with pytest.raises(InvalidRequest, match=f"need {needed} blocks of {BLOCK}; the pool has {POOL}") as caught:
        small.admit(ids(prompt) if asked is None else ids(prompt, max_tokens=asked))
    assert (caught.value.limit, caught.value.value) == (f"{POOL} blocks", f"{needed} blocks")


def test_the_pool_may_be_filled_exactly(small: Door) -> None:
    assert small.admit(ids(POOL * BLOCK - 1)).choices[0].submission.max_tokens == 1
    assert small.admit(ids(BLOCK, max_tokens=(POOL - 1) * BLOCK)).choices[0].submission.max_tokens == (POOL - 1) * BLOCK


# Several choices.


def test_choices_differ_in_their_number_and_their_text_only(door: Door) -> None:
    first, second, third = (asked.submission for asked in door.admit(ids(3, n=3, stop=["x"])).choices)
    assert [first.choice, second.choice, third.choice] == [0, 1, 2]
    assert first.text is not second.text
    assert dataclasses.replace(second, choice=0, text=first.text) == first
    assert [asked.submission.choice for asked in door.admit(ids(3)).choices] == [0]


@pytest.mark.parametrize(
    "n, resume, field",
    [
        (2, {"token_ids": [70]}, "resume.choices"),
        (2, {"choices": [pb.ResumeChoice()]}, "resume.choices"),
        (2, {"choices": [pb.ResumeChoice()] * 3}, "resume.choices"),
        (2, {"choices": [pb.ResumeChoice()] * 2, "text_bytes_received": 1}, "resume.choices"),
        (1, {"choices": [pb.ResumeChoice()]}, "resume.choices"),
        (2, {"choices": [pb.ResumeChoice(), pb.ResumeChoice(token_ids=[512])]}, "resume.choices[1].token_ids[0]"),
        (
            2,
            {"choices": [pb.ResumeChoice(), pb.ResumeChoice(text_bytes_received=3)]},
            "resume.choices[1].text_bytes_received",
        ),
    ],
)
def test_what_has_come_of_choices_is_told_for_each(door: Door, n: int, resume: dict[str, Any], field: str) -> None:
    hint = door.admit(ids(3)).started.hint
    with pytest.raises(InvalidRequest) as caught:
        door.admit(ids(3, n=n, resume=pb.Resume(hint=hint, **resume)))
    assert caught.value.field == field


# What is let in.


def test_defaults(door: Door) -> None:
    entry = door.admit(Request(text="the quick brown fox"))
    asked = entry.choices[0].submission
    assert (asked.client_id, asked.tenant, asked.endpoint, asked.salt, asked.priority) == (
        "drawn",
        "default",
        "",
        "",
        0,
    )
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k, asked.sampling.min_p) == (
        0,
        1,
        0,
        0,
    )
    assert (asked.sampling.seed, asked.logprobs, asked.ttft_deadline_us, asked.deadline_us) == (42, -1, 0, 0)
    assert asked.stop_token_ids == {IM_END}
    assert not asked.takes_over and entry.choices[0].ended is None
    assert entry.started.request_id == "drawn"
    assert not entry.started.prompt_token_ids
    assert asked.prompt_ids.dtype == np.int32


def test_everything_asked_for(door: Door) -> None:
    entry = door.admit(
        ids(
            3,
            request_id="mine",
            max_tokens=9,
            sampling=pb.Sampling(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=2**64 - 1),
            stop=["x", "yz"],
            stop_token_ids=[7, 7, 8],
            ignore_eos=True,
            logprobs=0,
            n=1,
            priority=-100,
            tenant="Käse & Co",
            endpoint="chat/v1",
            salt="\x00odd\n",
            ttft_deadline_ms=5,
            deadline_ms=7,
            return_prompt_token_ids=True,
        )
    )
    asked = entry.choices[0].submission
    assert asked.sampling == type(asked.sampling)(0.5, 0.25, 7, 0.125, 2**64 - 1)
    assert (asked.max_tokens, asked.logprobs, asked.priority) == (9, 0, -100)
    assert (asked.tenant, asked.endpoint, asked.salt) == ("Käse & Co", "chat/v1", "\x00odd\n")
    assert (asked.ttft_deadline_us, asked.deadline_us) == (5000, 7000)
    assert asked.stop_token_ids == {7, 8}
    assert list(entry.started.prompt_token_ids) == asked.prompt_ids.tolist() == [5, 6, 7]


def test_neutral_penalties_are_no_penalties(door: Door) -> None:
    door.admit(sampling(repetition_penalty=1, presence_penalty=0, frequency_penalty=0))


def test_a_temperature_too_small_to_divide_by_is_greedy(door: Door) -> None:
    assert door.admit(sampling(temperature=1e-30)).choices[0].submission.sampling.temperature == 0
    assert door.admit(sampling(temperature=1e-3)).choices[0].submission.sampling.temperature == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "asked, left, expected", [(0, None, 0), (0, 300, 300), (5, 9_000, 5_000), (5, 70, 70), (5, -3, 1)]
)
def test_the_calls_own_deadline_counts(door: Door, asked: int, left: int | None, expected: int) -> None:
    request = ids(3, deadline_ms=asked) if asked else ids(3)
    assert door.admit(request, left).choices[0].submission.deadline_us == expected


def test_a_chat_goes_through_the_template(door: Door, tokenizer: Tokenizer) -> None:
    entry = door.admit(Request(chat=chat(("system", "s"), ("user", "")), return_prompt_token_ids=True))
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    assert list(entry.started.prompt_token_ids) == tokenizer.encode(expected).tolist()


def test_what_the_template_objects_to_is_an_invalid_request(tokenizer: Tokenizer, tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        Door(load_tokenizer(directory), INFO).admit(Request(chat=chat(("user", "a"))))
    assert caught.value.field == "chat"


# Resuming.


def resumed(entry: Entry, generated: list[int], received: int = 0, **more: Any) -> pb.GenerateRequest:
    resume = pb.Resume(hint=entry.started.hint, token_ids=generated, text_bytes_received=received)
    return ids(3, request_id=entry.started.request_id, resume=resume, **more)


def test_the_hint_says_all_that_is_needed(door: Door) -> None:
    hint = door.admit(ids(3)).started.hint
    digest = hashlib.sha256(np.array([5, 6, 7], "<i4").tobytes()).digest()
    assert hint == pb.ResumeHint(seed=42, prompt_digest=digest, model_version="v1", fingerprint=b"f" * 32)


def test_a_resume_goes_on(door: Door, tokenizer: Tokenizer) -> None:
    first = door.admit(ids(3, sampling=pb.Sampling(seed=7)))
    generated = tokenizer.encode("the quick").tolist()
    entry = door.admit(resumed(first, generated, received=4))
    assert entry.choices[0].ended is None
    assert entry.started.hint == first.started.hint
    assert entry.choices[0].submission.sampling.seed == 7
    assert list(entry.choices[0].submission.resumed_ids) == generated
    assert entry.choices[0].submission.takes_over
    assert entry.choices[0].submission.text.take() == "quick"


def test_a_resume_of_nothing_is_a_beginning(door: Door) -> None:
    first = door.admit(ids(3))
    entry = door.admit(resumed(first, []))
    assert (
        entry.choices[0].ended is None
        and entry.choices[0].submission.resumed_ids == ()
        and entry.started.hint.seed == 42
    )


def test_an_anonymous_resume_takes_nothing_over(door: Door) -> None:
    request = resumed(door.admit(ids(3)), [])
    request.ClearField("request_id")
    assert not door.admit(request).choices[0].submission.takes_over


def test_another_fingerprint_goes_on_and_is_flagged(door: Door, tokenizer: Tokenizer) -> None:
    first = door.admit(ids(3))
    elsewhere = Door(tokenizer, dataclasses.replace(INFO, fingerprint=b"g" * 32))
    second = elsewhere.admit(resumed(first, [70]))
    assert second.started.hint.not_identical
    assert second.started.hint.fingerprint == b"g" * 32
    back = door.admit(resumed(second, [70]))
    assert back.started.hint.not_identical  # stays set


def change(name: str, value: object) -> Callable[[pb.GenerateRequest], None]:
    return lambda request: setattr(request.resume.hint, name, value)


@pytest.mark.parametrize(
    "alter, kind, field",
    [
        (change("model_version", "v2"), Conflict, "resume.hint.model_version"),
        (change("adapter_version", "a"), Conflict, "resume.hint.adapter_version"),
        (change("prompt_digest", b"x" * 32), InvalidRequest, "resume.hint.prompt_digest"),
        (change("prompt_digest", b""), InvalidRequest, "resume.hint.prompt_digest"),
        (lambda r: setattr(r.sampling, "seed", 1), InvalidRequest, "sampling.seed"),
        (lambda r: r.resume.token_ids.extend([70] * 200), InvalidRequest, "resume.token_ids"),
        (lambda r: setattr(r.resume, "text_bytes_received", 1000), InvalidRequest, "resume.text_bytes_received"),
        (lambda r: setattr(r.resume, "text_bytes_received", 2**64 - 1), InvalidRequest, "resume.text_bytes_received"),
        (lambda r: r.token_ids.ids.append(5), InvalidRequest, "resume.hint.prompt_digest"),
    ],
)
def test_a_wrong_resume_is_refused(
    door: Door, alter: Callable[[pb.GenerateRequest], None], kind: type[JitneyError], field: str
) -> None:
    request = resumed(door.admit(ids(3)), [70, 71])
    door.admit(request)
    alter(request)
    with pytest.raises(kind) as caught:
        door.admit(request)
    assert caught.value.field == field


def test_ids_that_end_the_answer_are_answered_at_once(door: Door, tokenizer: Tokenizer) -> None:
    first = door.admit(ids(3))
    said = tokenizer.encode("one two").tolist()

    stopped = door.admit(resumed(first, [*said, IM_END], received=4))
    assert stopped.choices[0].ended is not None
    assert (stopped.choices[0].ended.reason, stopped.choices[0].ended.stop_token_id) == (FinishReason.STOP, IM_END)
    assert (stopped.choices[0].ended.prompt_tokens, stopped.choices[0].ended.generated_tokens) == (3, len(said) + 1)
    assert stopped.choices[0].ended_text == "two"

    ignored = door.admit(resumed(first, [*said, IM_END], ignore_eos=True))
    assert ignored.choices[0].ended is None

    full = door.admit(resumed(first, said, received=0, max_tokens=len(said)))
    assert full.choices[0].ended is not None and full.choices[0].ended.reason is FinishReason.LENGTH
    assert full.choices[0].ended_text == "one two"

    matched = door.admit(resumed(first, said, received=1, stop=[" tw", "zzz"], max_tokens=len(said)))
    assert matched.choices[0].ended is None or matched.choices[0].ended.reason is FinishReason.STOP
    assert matched.choices[0].ended is not None and matched.choices[0].ended.stop_matched == " tw"
    assert matched.choices[0].ended_text == "ne"


def test_ids_behind_the_end_are_refused(door: Door, tokenizer: Tokenizer) -> None:
    first = door.admit(ids(3))
    for generated, more in (([70, IM_END, 71], {}), ([70, 71, 72], {"max_tokens": 2})):
        with pytest.raises(InvalidRequest, match="the answer ends with the first 2") as caught:
            door.admit(resumed(first, generated, **more))
        assert (caught.value.limit, caught.value.value) == ("2", "3")


# Anything at all.


@st.composite
def messages(draw: st.DrawFn) -> pb.GenerateRequest:
    """Arbitrary fields, mostly odd."""
    ints, floats, text = st.integers(-(2**31), 2**31 - 1), st.floats(width=32), st.text(max_size=20)
    request = pb.GenerateRequest()
    kind = draw(st.sampled_from(["text", "ids", "chat", "none"]))
    if kind == "text":
        request.text = draw(st.text(max_size=200))
    elif kind == "ids":
        request.token_ids.ids.extend(draw(st.lists(st.integers(0, 600), max_size=140)))
    elif kind == "chat":
        roles = st.sampled_from(["system", "user", "assistant", "x"])
        for role, content in draw(st.lists(st.tuples(roles, text), max_size=4)):
            tokens = draw(st.lists(st.integers(0, 520), max_size=3)) if role == "assistant" else []
            request.chat.messages.add(role=role, content=content, token_ids=tokens)
    for name in draw(st.sets(st.sampled_from(["max_tokens", "logprobs", "n", "priority", "deadline_ms"]))):
        setattr(request, name, draw(st.one_of(st.integers(0, 30), ints)))
    for name in draw(st.sets(st.sampled_from(["temperature", "top_p", "min_p", "presence_penalty"]))):
        setattr(request.sampling, name, draw(st.one_of(st.floats(0, 1, width=32), floats)))
    for name in draw(st.sets(st.sampled_from(["request_id", "tenant", "endpoint", "salt"]))):
        setattr(request, name, draw(text))
    request.stop.extend(draw(st.lists(text, max_size=3)))
    request.stop_token_ids.extend(draw(st.lists(st.integers(0, 600), max_size=3)))
    if draw(st.booleans()):
        request.resume.token_ids.extend(draw(st.lists(st.integers(0, 520), max_size=5)))
        request.resume.hint.prompt_digest = draw(st.binary(max_size=33))
    return request


@settings(max_examples=300, deadline=None)
@given(messages())
def test_anything_is_let_in_whole_or_refused_with_its_field(door: Door, request_: pb.GenerateRequest) -> None:
    try:
        entry = door.admit(request_)
    except JitneyError as error:
        assert error.field and error.message
    else:
        asked = entry.choices[0].submission
        assert len(asked.prompt_ids) >= 1 and len(asked.prompt_ids) + asked.max_tokens <= CONTEXT
        assert asked.prompt_ids.min() >= 0 and asked.prompt_ids.max() < VOCABULARY
        assert 0 < asked.sampling.top_p <= 1 and math.isfinite(asked.sampling.temperature)
