"""`jitney generate`: one answer, streamed to stdout."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from jitney.cli import common, prompts, sampling
from jitney.client import Answer, Choice, ChoiceEnd, Completion, Delta, Options, Usage


def generate(
    prompt: Annotated[str, typer.Argument(help='What to say to the model; "-" reads it from stdin.')],
    system: sampling.System = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on with the text as it is, not as a message of a chat.")
    ] = False,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = 0.0,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    choices: Annotated[
        int,
        typer.Option("--choices", min=1, max=32, help="How many answers, each drawn by itself; give a temperature."),
    ] = 1,
    logprobs: Annotated[int | None, typer.Option("--logprobs", help="With --json: top k of each token.")] = None,
    priority: sampling.Priority = 0,
    tenant: sampling.Tenant = "",
    salt: sampling.Salt = "",
    deadline_ms: sampling.DeadlineMs = None,
    request_id: Annotated[str, typer.Option("--request-id", help="Id for `jitney explain`; absent: a new one.")] = "",
    stats: Annotated[bool, typer.Option("--stats", help="Times and counts on stderr.")] = False,
    as_json: common.AsJson = False,
    target: common.Target = common.TARGET,
    patience: common.Patience = common.PATIENCE_S,
    tls_ca: common.TlsCa = None,
) -> None:
    """Answers one prompt; the text is streamed as it comes."""
    options = Options(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
        stop=stop or (), logprobs=logprobs, n=choices, priority=priority, tenant=tenant, salt=salt,
        deadline_ms=deadline_ms,
    )  # fmt: skip
    with common.client(target, patience, tls_ca) as client:
        asked = prompts.asked(client, prompts.text_of(prompt), system, raw)
        answer = client.generate(asked, options, request_id=request_id)
        done = answer.result() if as_json else _stream(answer) if choices <= 1 else _one_by_one(answer)
    if as_json:
        print(json.dumps(_plain(done), ensure_ascii=False))
    if stats:
        common.notes().print(stats_line(done))
    if not done.finished.reason.whole:
        common.notes().print(f"jitney: the answer is not whole: {done.finished.reason.name.lower()}")
    raise typer.Exit(common.FINISH_CODES.get(done.finished.reason, 1))


def _stream(answer: Answer) -> Completion:
    with answer:
        for event in answer:
            if isinstance(event, Delta):
                common.emit(event.text)
        common.emit("\n")
        return answer.result()


def _one_by_one(answer: Answer) -> Completion:
    """Several answers, each when it is whole."""
    texts: dict[int, list[str]] = {}
    with answer:
        for event in answer:
            if isinstance(event, Delta):
                texts.setdefault(event.choice, []).append(event.text)
            elif isinstance(event, ChoiceEnd):
                said = "".join(texts.pop(event.choice, ()))
                common.emit(f"[{event.choice}] ({event.reason.name.lower()})\n{said}\n\n")
        return answer.result()


def _plain(done: Completion) -> dict[str, object]:
    """For JSON."""
    finished = done.finished
    several = {"choices": [_plain_choice(choice) for choice in done.choices]} if len(done.choices) > 1 else {}
    return several | {
        "request_id": done.started.request_id,
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": finished.reason.name.lower(),
        "stop_matched": finished.stop_matched,
        "seed": done.started.seed,
        "model_version": done.started.model_version,
        "logprobs": [dataclasses.asdict(item) for item in done.logprobs],
        "usage": dataclasses.asdict(finished.usage),
        "timings": dataclasses.asdict(finished.timings),
        "resumed": done.resumed,
        "not_identical": done.not_identical,
    }


def _cached(usage: Usage) -> str:
    """Where the cached tokens lay, if not all on the device."""
    lower = [(usage.cached_cpu_tokens, "in memory"), (usage.cached_ssd_tokens, "on disk")]
    where = "".join(f", {count} {place}" for count, place in lower if count)
    return f"{usage.cached_tokens} of them cached" + (
        f" ({usage.cached_device_tokens} on the device{where})" if where else ""
    )


def _plain_choice(choice: Choice) -> dict[str, object]:
    return dataclasses.asdict(choice) | {"reason": choice.reason.name.lower()}


def stats_line(done: Completion) -> str:
    """Counts and times of an answer in one line."""
    usage, timings = done.finished.usage, done.finished.timings
    speed = 1e6 / timings.tpot_us if timings.tpot_us else 0.0
    parts = [
        f"{usage.prompt_tokens} prompt tokens, {_cached(usage)}",
        f"{usage.generated_tokens} generated",
        f"{usage.billable_tokens} billed",
        f"first after {timings.ttft_us / 1000:.0f} ms, then {speed:.1f} a second",
        done.finished.reason.name.lower(),
    ]
    if done.resumed:
        parts.append(f"resumed {done.resumed} times")
    return " · ".join(parts)
