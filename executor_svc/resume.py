"""Going on with an answer that another stream began: the hint is checked, the ids that the client has are fed to the
text, and an answer that they already end is recognised."""

from __future__ import annotations

import hashlib

import numpy as np

from executor_svc import checks
from executor_svc.checks import wrong
from executor_svc.model_info import ModelInfo
from executor_svc.request import Finish, FinishReason, Submission
from executor_svc.text import AnswerText, ends_character
from jitney.columns import I32
from jitney.errors import Conflict
from jitney.executor.v1 import executor_pb2 as pb


def prompt_digest(prompt_ids: I32) -> bytes:
    """sha256 over the ids, int32 little-endian."""
    return hashlib.sha256(np.ascontiguousarray(prompt_ids, "<i4").tobytes()).digest()


def check_hint(hint: pb.ResumeHint, digest: bytes, seed: int | None, info: ModelInfo) -> None:
    """Raises Conflict for another model's answer, InvalidRequest for another prompt's or another seed's."""
    for name, theirs, ours in (
        ("model_version", hint.model_version[:128], info.version),
        ("adapter_version", hint.adapter_version[:128], ""),
    ):
        if theirs != ours:
            what = f'the answer is of {name} "{theirs}", here it is "{ours}"'
            raise Conflict(what, field=f"resume.hint.{name}", limit=ours, value=theirs)
    if hint.prompt_digest != digest:
        what = "the prompt is not the one that the answer belongs to: its digest differs"
        raise wrong("resume.hint.prompt_digest", what, digest.hex(), hint.prompt_digest[:64].hex())
    if seed is not None and seed != hint.seed:
        raise wrong("sampling.seed", f"sampling.seed is {seed}, the answer was drawn with {hint.seed}", hint.seed, seed)


def received(resume: pb.Resume, n: int, info: ModelInfo) -> list[tuple[tuple[int, ...], int]]:
    """Of each of `n` choices, what the client has: token ids, and bytes of text. Nothing where nothing is resumed."""
    if n == 1 or resume == pb.Resume():
        checks.count("resume.choices", len(resume.choices), 0)
        return [_received("resume", resume, info)] * n
    if len(resume.choices) != n or resume.token_ids or resume.text_bytes_received:
        what = f"with n = {n} what has come stands in {n} resume.choices, not {len(resume.choices)}, and nowhere else"
        raise wrong("resume.choices", what, n, len(resume.choices))
    return [_received(f"resume.choices[{at}]", choice, info) for at, choice in enumerate(resume.choices)]


def _received(field: str, part: pb.Resume | pb.ResumeChoice, info: ModelInfo) -> tuple[tuple[int, ...], int]:
    checks.count(f"{field}.token_ids", len(part.token_ids), info.context_tokens)
    ids = checks.token_ids(f"{field}.token_ids", part.token_ids, info.vocabulary)
    return tuple(ids.tolist()), part.text_bytes_received


def take_up(submission: Submission, text: AnswerText, received_bytes: int, field: str) -> tuple[Finish | None, str]:
    """Feeds the resumed ids to `text` and takes away what the client has of it; they stand in `field` of the request.

    Returns how the answer ended, if these ids end it, with the text that the client then still lacks. Raises
    InvalidRequest for ids behind the end, and for received bytes that are no part of the text.
    """
    ended = None
    ids = submission.resumed_ids
    for index, token_id in enumerate(ids):
        if ended is not None:
            what = f"{field}.token_ids has {len(ids)} ids, but the answer ends with the first {index}"
            raise wrong(f"{field}.token_ids", what, index, len(ids))
        ended = _end_at(submission, text, index, token_id)
    if ended is None:
        fits, rest = text.restart_after(received_bytes), ""
    else:
        data = text.finish().encode()
        fits = ends_character(data, received_bytes)
        rest = data[received_bytes:].decode() if fits else ""
    if not fits:
        what = f"{field}.text_bytes_received is {received_bytes}: the text of its token_ids cannot be cut there"
        raise wrong(f"{field}.text_bytes_received", what, "the end of a character of the text", received_bytes)
    return ended, rest


def _end_at(submission: Submission, text: AnswerText, index: int, token_id: int) -> Finish | None:
    """How the answer ended, if it did with its token `index`."""
    reason, stop_token, matched = FinishReason.UNSPECIFIED, None, None
    if token_id in submission.stop_token_ids:
        reason, stop_token = FinishReason.STOP, token_id
    elif (matched := text.push([token_id])) is not None:
        reason = FinishReason.STOP
    elif index + 1 == submission.max_tokens:
        reason = FinishReason.LENGTH
    if reason is FinishReason.UNSPECIFIED:
        return None
    return Finish(
        reason,
        stop_matched=matched or "",
        stop_token_id=stop_token,
        prompt_tokens=len(submission.prompt_ids),
        generated_tokens=index + 1,
    )
