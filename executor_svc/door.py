"""The door: a client's message becomes a Submission, or a typed error that names field, limit and value.

Everything that can be known before a request waits is settled here: what is malformed, what can never fit into the
context or the pool, what is not built yet, and an answer that a resume finds already ended. It needs no scheduler and
no cache. Works on any thread; tokenising lets other threads run.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from executor_svc import checks
from executor_svc.checks import wrong
from executor_svc.limits import Limits
from executor_svc.model_info import ModelInfo
from executor_svc.request import Finish, Sampling, Submission
from executor_svc.resume import check_hint, prompt_digest, received, take_up
from executor_svc.stop_strings import StopStrings
from executor_svc.tenants import Tenants
from executor_svc.text import AnswerText
from executor_svc.tokenizer import Tokenizer, Turn
from jitney import features
from jitney.columns import I32
from jitney.errors import TooLarge
from jitney.executor.v1 import executor_pb2 as pb

ROLES = ("system", "user", "assistant")
DEFAULT_TENANT = "default"
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Asked:
    """One choice of a request. With `ended` it was over before: nothing is left to run, and `ended_text` is the text
    that the client lacks."""

    submission: Submission
    ended: Finish | None = None
    ended_text: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that was let in: what to answer at once, and its choices."""

    started: pb.Started
    choices: Sequence[Asked]


class Door:
    """Holds only what never changes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: ModelInfo,
        limits: Limits | None = None,
        tenants: Tenants | None = None,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
        draw_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._limits = limits or Limits()
        self._tenants = tenants or Tenants()
        self._draw_seed = draw_seed
        self._draw_id = draw_id

    def admit(self, request: pb.GenerateRequest, time_left_us: int | None = None) -> Entry:
        """Validates; what is cheap to check comes first. `time_left_us`: what the call itself has left, if it has a
        deadline. Raises InvalidRequest, TooLarge (the message) or Conflict (a resume of another model's answer)."""
        self._refuse_large(request)
        _refuse_unbuilt(request)
        client_id = checks.name("request_id", request.request_id, self._limits.request_id_bytes)
        stop_ids = self._stop_ids(request)
        stops = self._stops(request)
        n = checks.integer("n", request.n, 0, self._limits.choices) or 1
        resumed = received(request.resume, n, self._info)
        sampling, logprobs, priority = (
            self._sampling(request.sampling),
            self._logprobs(request),
            self._priority(request),
        )
        tenant, endpoint, salt = self._names(request)
        ttft_deadline_us = self._deadline_us(request, "ttft_deadline_ms")
        deadline_us = _sooner(self._deadline_us(request, "deadline_ms"), time_left_us)
        prompt_ids = self._prompt(request)
        hint = self._hint(request, prompt_ids)
        submission = Submission(
            client_id=client_id or self._draw_id(),
            prompt_ids=prompt_ids,
            max_tokens=self._max_tokens(request, len(prompt_ids)),
            text=AnswerText(self._tokenizer.pieces, stops, stop_ids),
            sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, hint.seed),
            stop_token_ids=stop_ids,
            logprobs=logprobs,
            priority=priority,
            tenant=tenant,
            endpoint=endpoint,
            salt=salt,
            ttft_deadline_us=ttft_deadline_us,
            deadline_us=deadline_us,
            takes_over=request.HasField("resume") and client_id != "",
            features=_features(request),
        )
        started = pb.Started(
            request_id=submission.client_id,
            hint=hint,
            prompt_tokens=len(prompt_ids),
            prompt_token_ids=prompt_ids.tolist() if request.return_prompt_token_ids else (),
            max_tokens=submission.max_tokens,
        )
        choices = []
        for choice, (ids, text_bytes) in enumerate(resumed):
            text = AnswerText(self._tokenizer.pieces, stops, stop_ids)
            one = replace(submission, text=text, choice=choice, resumed_ids=ids)
            field = f"resume.choices[{choice}]" if n > 1 else "resume"
            choices.append(Asked(one, *take_up(one, text, text_bytes, field)))
        return Entry(started, choices)

    def prompt(self, request: pb.GenerateRequest) -> tuple[I32, str]:
        """Token ids and salt only. Raises as `admit` does."""
        self._refuse_large(request)
        salt = checks.short("salt", request.salt, self._limits.salt_bytes)
        ids = self._prompt(request)
        self._refuse_long(len(ids))
        return ids, salt

    def _sampling(self, asked: pb.Sampling) -> Sampling:
        """All but the seed."""
        temperature = checks.real("sampling.temperature", asked.temperature, 0.0, self._limits.temperature)
        top_p = asked.top_p if asked.HasField("top_p") else 1.0
        return Sampling(
            temperature=temperature if temperature >= self._limits.greedy_below else 0.0,
            top_p=checks.real("sampling.top_p", top_p, 0.0, 1.0, least_allowed=False),
            top_k=checks.integer("sampling.top_k", asked.top_k, 0, MAX_INT32),
            min_p=checks.real("sampling.min_p", asked.min_p, 0.0, 1.0),
        )

    def _logprobs(self, request: pb.GenerateRequest) -> int:
        asked = checks.integer("logprobs", request.logprobs, 0, self._limits.logprobs)
        return asked if request.HasField("logprobs") else -1

    def _priority(self, request: pb.GenerateRequest) -> int:
        tenant = request.tenant or DEFAULT_TENANT
        least, most = self._limits.priority
        return checks.integer("priority", request.priority, least, min(most, self._tenants.of(tenant).max_priority))

    def _names(self, request: pb.GenerateRequest) -> tuple[str, str, str]:
        """Tenant, endpoint and salt."""
        limits = self._limits
        return (
            checks.name("tenant", request.tenant, limits.name_bytes) or DEFAULT_TENANT,
            checks.name("endpoint", request.endpoint, limits.name_bytes),
            checks.short("salt", request.salt, limits.salt_bytes),
        )

    def _stops(self, request: pb.GenerateRequest) -> StopStrings | None:
        checks.count("stop", len(request.stop), self._limits.stop_strings)
        for index, stop in enumerate(request.stop):
            if not stop:
                raise wrong(f"stop[{index}]", f"stop[{index}] is empty", "at least 1 byte", "0 bytes")
            checks.short(f"stop[{index}]", stop, self._limits.stop_string_bytes)
        return StopStrings(request.stop) if request.stop else None

    def _stop_ids(self, request: pb.GenerateRequest) -> frozenset[int]:
        checks.count("stop_token_ids", len(request.stop_token_ids), self._limits.stop_token_ids)
        asked = checks.token_ids("stop_token_ids", request.stop_token_ids, self._info.vocabulary)
        own = () if request.ignore_eos else self._tokenizer.eos_ids
        return frozenset(asked.tolist()) | frozenset(own)

    def _deadline_us(self, request: pb.GenerateRequest, field: str) -> int:
        if not request.HasField(field):
            return 0
        return 1000 * checks.integer(field, getattr(request, field), 1, self._limits.deadline_ms)

    def _prompt(self, request: pb.GenerateRequest) -> I32:
        """Token ids of the prompt, at least one, all in the vocabulary."""
        kind = request.WhichOneof("prompt")
        if kind == "text":
            if not request.text:
                raise wrong("text", "text is empty", "at least 1 token", "0 bytes")
            self._refuse_endless("text", request.text)
            ids = self._tokenizer.encode(request.text)
        elif kind == "token_ids":
            self._refuse_long(len(request.token_ids.ids))
            ids = checks.token_ids("token_ids.ids", request.token_ids.ids, self._info.vocabulary)
        elif kind == "chat":
            ids = self._chat(request.chat)
        else:
            raise wrong("prompt", "there is no prompt: send text, token_ids or chat", "text, token_ids or chat", "none")
        if len(ids) == 0:
            raise wrong(kind, f"{kind} makes no tokens", "at least 1 token", 0)
        return checks.token_ids(kind, ids, self._info.vocabulary)

    def _chat(self, chat: pb.Chat) -> I32:
        if not chat.messages:
            raise wrong("chat.messages", "chat has no messages", "at least 1", 0)
        checks.count("chat.messages", len(chat.messages), self._limits.chat_messages)
        self._refuse_long(sum(len(message.token_ids) for message in chat.messages))
        turns = []
        for index, message in enumerate(chat.messages):
            field = f"chat.messages[{index}]"
            if message.role not in ROLES:
                known, role = ", ".join(ROLES), ascii(message.role[:64])
                raise wrong(f"{field}.role", f"{field}.role must be one of {known}, not {role}", known, role)
            if message.token_ids and message.role != "assistant":
                what = f"{field}.token_ids is what an assistant generated, it cannot be a {message.role}'s"
                raise wrong(f"{field}.token_ids", what, "role assistant", message.role)
            ids = checks.token_ids(f"{field}.token_ids", message.token_ids, self._info.vocabulary)
            turns.append(Turn(message.role, message.content, ids.tolist()))
        self._refuse_endless("chat", "".join(t.content for t in turns))
        return self._tokenizer.encode_chat(turns)

    def _refuse_large(self, request: pb.GenerateRequest) -> None:
        if (size := request.ByteSize()) > self._limits.request_bytes:
            what = f"the request has {size} bytes, at most {self._limits.request_bytes} are taken"
            raise TooLarge(what, field="request", limit=self._limits.request_bytes, value=size)

    def _refuse_endless(self, field: str, text: str) -> None:
        """Before any work: text that can be known to be over the context by its size alone."""
        least, most = self._tokenizer.least_tokens(text), self._info.context_tokens - 1
        if least > most:
            what = f"{field} makes at least {least} tokens; of the context of {most + 1} a prompt may take {most}"
            raise wrong(field, what, most, f"at least {least}")

    def _refuse_long(self, prompt: int) -> None:
        """A prompt that leaves no token of the context; before millions of ids are looked at one by one."""
        context = self._info.context_tokens
        if prompt >= context:
            what = f"the prompt has {prompt} tokens; of the context of {context} a prompt may take {context - 1}"
            raise wrong("prompt", what, context - 1, prompt)

    def _max_tokens(self, request: pb.GenerateRequest, prompt: int) -> int:
        """What is in force: as asked, or all that context and pool leave. Refuses what can never fit."""
        context, block, pool = self._info.context_tokens, self._info.block_tokens, self._info.pool_blocks
        asked = request.max_tokens if request.HasField("max_tokens") else None
        if asked is not None and asked < 1:
            raise wrong("max_tokens", f"max_tokens must be at least 1, not {asked}", "at least 1", asked)
        self._refuse_long(prompt)
        wanted = asked if asked is not None else 1
        if prompt + wanted > context:
            what = f"prompt {prompt} + max_tokens {wanted} = {prompt + wanted} tokens; the context has {context}"
            raise wrong("max_tokens", what, context - prompt, wanted)
        needed = -(-(prompt + wanted) // block)
        if needed > pool:
            what = f"prompt {prompt} + max_tokens {wanted} = {prompt + wanted} tokens"
            what = f"{what} need {needed} blocks of {block}; the pool has {pool}"
            raise wrong(
                "prompt" if prompt >= pool * block else "max_tokens", what, f"{pool} blocks", f"{needed} blocks"
            )
        return asked if asked is not None else min(context, pool * block) - prompt

    def _hint(self, request: pb.GenerateRequest, prompt_ids: I32) -> pb.ResumeHint:
        """The hint that this executor gives; it continues the client's own, if it has one."""
        info, digest = self._info, prompt_digest(prompt_ids)
        seed = request.sampling.seed if request.sampling.HasField("seed") else None
        not_identical = False
        if request.HasField("resume"):
            if not request.resume.HasField("hint"):
                raise wrong("resume.hint", "resume has no hint", "the hint of the broken stream", "none")
            hint = request.resume.hint
            check_hint(hint, digest, seed, info)
            seed, not_identical = hint.seed, hint.not_identical or hint.fingerprint != info.fingerprint
        return pb.ResumeHint(
            seed=self._draw_seed() if seed is None else seed,
            prompt_digest=digest,
            model_version=info.version,
            fingerprint=info.fingerprint,
            not_identical=not_identical,
        )


def _refuse_unbuilt(request: pb.GenerateRequest) -> None:
    asked = request.sampling
    for name, neutral in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
        value: float = getattr(asked, name)
        if asked.HasField(name) and value != neutral:
            what = f"sampling.{name} is not built yet: it must be {neutral:g}, not {value:g}"
            raise wrong(f"sampling.{name}", what, f"{neutral:g}", f"{value:g}")
    if asked.logit_bias:
        size = len(asked.logit_bias)
        raise wrong("sampling.logit_bias", f"sampling.logit_bias is not built yet, it had {size} entries", 0, size)


def _features(request: pb.GenerateRequest) -> int:
    """Prompt signals; none of a prompt that was given as token ids."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return features.count([request.text])
    if kind == "chat":
        return features.count([message.content for message in request.chat.messages])
    return 0


def _sooner(deadline_us: int, time_left_us: int | None) -> int:
    """The nearer of two deadlines; 0 stands for none."""
    if time_left_us is None:
        return deadline_us
    left = max(1, time_left_us)
    return min(deadline_us, left) if deadline_us else left
