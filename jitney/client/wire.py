"""Between the values of `types` and the messages of the executor's proto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jitney.client.types import (
    BlockCounts,
    CachedPrefix,
    Choice,
    ChoiceEnd,
    Completion,
    Delta,
    Explanation,
    Finished,
    FinishReason,
    Message,
    ModelInfo,
    Options,
    Policy,
    Prompt,
    Started,
    Status,
    StepRecord,
    Timings,
    TokenLogprobs,
    Usage,
)
from jitney.errors import InvalidRequest
from jitney.executor.v1 import executor_pb2 as pb
from jitney.scheduler.v1 import scheduler_pb2

OPTIONAL = ("max_tokens", "logprobs", "ttft_deadline_ms", "deadline_ms")
PLAIN = ("ignore_eos", "n", "priority", "tenant", "endpoint", "salt", "return_prompt_token_ids")
REPEATED = ("stop", "stop_token_ids")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


def generate_request(prompt: Prompt, options: Options, request_id: str) -> pb.GenerateRequest:
    """The message of a request. Raises InvalidRequest for what a message cannot hold; the executor checks the rest."""
    request = pb.GenerateRequest()
    _set(request, "request_id", request_id)
    _set_prompt(request, prompt)
    for name in PLAIN:
        _set(request, name, getattr(options, name))
    for name in OPTIONAL:
        if getattr(options, name) is not None:
            _set(request, name, getattr(options, name))
    for name in REPEATED:
        _extend(request, name, getattr(options, name))
    for name in SAMPLING:
        if getattr(options, name) is not None:
            _set(request.sampling, name, getattr(options, name))
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _set(request, "text", prompt)
        return
    messages = [part for part in prompt if isinstance(part, Message)]
    if messages and len(messages) != len(prompt):
        raise InvalidRequest("a prompt is either messages or token ids, not both", field="prompt")
    if not messages:
        request.token_ids.SetInParent()
        _extend(request.token_ids, "ids", [part for part in prompt if not isinstance(part, Message)], "token_ids")
    for message in messages:
        part = request.chat.messages.add()
        _set(part, "role", message.role)
        _set(part, "content", message.content)
        _extend(part, "token_ids", message.token_ids)


def _set(message: object, name: str, value: object) -> None:
    try:
        setattr(message, name, value)
    except (ValueError, TypeError) as error:
        raise _unfit(name, value) from error


def _extend(message: object, name: str, values: Sequence[object], shown: str = "") -> None:
    try:
        getattr(message, name).extend(values)
    except (ValueError, TypeError) as error:
        raise _unfit(shown or name, values) from error


def _unfit(name: str, value: object) -> InvalidRequest:
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return InvalidRequest(f"{name} cannot be {text}", field=name, value=text)


def started(event: pb.Started) -> Started:
    """Of a stream or of a unary answer."""
    return Started(
        request_id=event.request_id,
        seed=event.hint.seed,
        prompt_tokens=event.prompt_tokens,
        max_tokens=event.max_tokens,
        model_version=event.hint.model_version,
        fingerprint=event.hint.fingerprint,
        prompt_token_ids=tuple(event.prompt_token_ids),
    )


def logprobs(items: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """One a token."""
    return tuple(TokenLogprobs(item.logprob, tuple(item.top_ids), tuple(item.top_logprobs)) for item in items)


def delta(event: pb.Delta) -> Delta:
    """New tokens and text."""
    return Delta(tuple(event.token_ids), event.text, logprobs(event.logprobs), event.choice)


def choice_end(event: pb.ChoiceEnd) -> ChoiceEnd:
    """The end of one of several answers."""
    return ChoiceEnd(
        choice=event.choice,
        reason=finish_reason(event.reason),
        generated_tokens=event.generated_tokens,
        stop_matched=event.stop_matched,
        stop_token_id=event.stop_token_id if event.HasField("stop_token_id") else None,
    )


def finish_reason(number: int) -> FinishReason:
    """UNSPECIFIED for one of a newer contract."""
    try:
        return FinishReason(number)
    except ValueError:
        return FinishReason.UNSPECIFIED


def finished(event: pb.Finished) -> Finished:
    """The end of an answer."""
    usage, timings = event.usage, event.timings
    return Finished(
        reason=finish_reason(event.reason),
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_device_tokens=usage.cached_device_tokens,
            cached_cpu_tokens=usage.cached_cpu_tokens,
            cached_ssd_tokens=usage.cached_ssd_tokens,
            generated_tokens=usage.generated_tokens,
            billable_tokens=usage.billable_tokens,
            billable_microtokens=usage.billable_microtokens,
            preemptions=usage.preemptions,
            computed_prompt_tokens=usage.computed_prompt_tokens,
        ),
        timings=Timings(timings.queue_us, timings.ttft_us, timings.total_us, timings.tpot_us, timings.steps),
        stop_matched=event.stop_matched,
        stop_token_id=event.stop_token_id if event.HasField("stop_token_id") else None,
    )


def completion(answer: pb.GenerateOnceResponse) -> Completion:
    """A unary answer."""
    end = finished(answer.finished)
    parts: list[tuple[pb.GenerateOnceResponse | pb.Choice, Finished | ChoiceEnd]] = [(answer, end)]
    if answer.choices:
        parts = [(part, choice_end(part.end)) for part in answer.choices]
    choices = tuple(choice(tuple(part.token_ids), part.text, logprobs(part.logprobs), last) for part, last in parts)
    return Completion(
        started=started(answer.started),
        token_ids=choices[0].token_ids,
        text=choices[0].text,
        logprobs=choices[0].logprobs,
        finished=end,
        choices=choices,
        not_identical=answer.started.hint.not_identical,
    )


def choice(
    token_ids: tuple[int, ...], text: str, likely: tuple[TokenLogprobs, ...], end: Finished | ChoiceEnd
) -> Choice:
    """A whole answer."""
    return Choice(token_ids, text, likely, end.reason, end.stop_matched, end.stop_token_id)


def model_info(answer: pb.GetModelInfoResponse) -> ModelInfo:
    """What is served."""
    return ModelInfo(
        name=answer.name,
        version=answer.version,
        fingerprint=answer.fingerprint,
        fingerprint_text=answer.fingerprint_text,
        context_tokens=answer.context_tokens,
        vocabulary=answer.vocabulary,
        block_tokens=answer.block_tokens,
        pool_blocks=answer.pool_blocks,
        block_bytes=answer.block_bytes,
        backend=answer.backend,
        arithmetic=answer.arithmetic,
        bit_invariant=answer.bit_invariant,
        eos_token_ids=tuple(answer.eos_token_ids),
        has_chat_template=answer.has_chat_template,
        row_multiple=answer.row_multiple,
        max_request_bytes=answer.max_request_bytes,
    )


def policy_choice(name: str, parameters: Mapping[str, int]) -> scheduler_pb2.PolicyChoice:
    """A choice with its parameters sorted, as the contract wants them."""
    choice = scheduler_pb2.PolicyChoice(name=name)
    for key in sorted(parameters):
        parameter = choice.parameters.add(name=key)
        _set(parameter, "value", parameters[key])
    return choice


def policy(choice: scheduler_pb2.PolicyChoice) -> Policy:
    """The policy in force."""
    return Policy(choice.name, {parameter.name: parameter.value for parameter in choice.parameters})


def wait_reason(reason: scheduler_pb2.WaitReason) -> str:
    """In one lower-case word; "" where there is none, the number of one of a newer contract."""
    if reason == scheduler_pb2.WAIT_REASON_UNSPECIFIED:
        return ""
    if reason not in scheduler_pb2.WaitReason.values():
        return str(reason)
    return scheduler_pb2.WaitReason.Name(reason).removeprefix("WAIT_REASON_").lower()


def status(answer: pb.GetStatusResponse) -> Status:
    """What runs and what waits."""
    blocks = answer.blocks
    return Status(
        executor=answer.executor,
        incarnation=answer.incarnation,
        step=answer.step,
        num_running=answer.num_running,
        num_waiting=answer.num_waiting,
        blocks=BlockCounts(blocks.total, blocks.free, blocks.evictable, blocks.leaving, blocks.granted),
        scheduler_connected=answer.scheduler_connected,
        cache_connected=answer.cache_connected,
        decisions=answer.decisions,
        coasted_steps=answer.coasted_steps,
        preemptions=answer.preemptions,
        finished={
            FinishReason.STOP: answer.finished_stop,
            FinishReason.LENGTH: answer.finished_length,
            FinishReason.ABORTED: answer.finished_aborted,
            FinishReason.DEADLINE: answer.finished_deadline,
            FinishReason.ERROR: answer.finished_error,
        },
        refused=answer.refused,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        generated_tokens=answer.generated_tokens,
        waiting_reasons={wait_reason(item.reason): item.count for item in answer.waiting_reasons},
        history=tuple(_step(record) for record in answer.history),
        policy=policy(answer.policy),
        not_ready=answer.not_ready,
        scheduler_build=answer.scheduler_build,
        cache_reopenings=answer.cache_reopenings,
        decide_us_p50=answer.decide_us_p50,
        decide_us_p99=answer.decide_us_p99,
        backend=answer.backend,
    )


def _step(record: pb.StepRecord) -> StepRecord:
    return StepRecord(
        step=record.step,
        at_us=record.at_us,
        rows=record.rows,
        tokens=record.tokens,
        prefill_tokens=record.prefill_tokens,
        step_us=record.step_us,
        decide_us=record.decide_us,
        waiting=record.waiting,
        free_blocks=record.free_blocks,
    )


def explanation(answer: pb.ExplainRequestResponse) -> Explanation:
    """One request, in one sentence."""
    said = answer.explanation
    return Explanation(
        state=said.state,
        reason=wait_reason(said.reason),
        sentence=said.sentence,
        needed=said.needed,
        available=said.available,
        ahead=said.ahead,
        history=tuple(answer.history),
    )


def explain_cache_request(prompt: Prompt, salt: str) -> pb.ExplainCacheRequest:
    """How much of the prompt is cached. Raises InvalidRequest for what a message cannot hold."""
    request = pb.ExplainCacheRequest()
    request.request.CopyFrom(generate_request(prompt, Options(salt=salt), ""))
    return request


def cached_prefix(answer: pb.ExplainCacheResponse) -> CachedPrefix:
    """How much of a prompt is cached."""
    return CachedPrefix(
        prompt_tokens=answer.prompt_tokens,
        block_tokens=answer.block_tokens,
        device_tokens=answer.device_tokens,
        cpu_tokens=answer.cpu_tokens,
        ssd_tokens=answer.ssd_tokens,
        pending_tokens=answer.pending_tokens,
        hit_tokens=answer.hit_tokens,
        sentence=answer.sentence,
        prefix_key=answer.prefix_key,
        model_version=answer.model_version,
        keys=tuple(answer.keys),
    )
