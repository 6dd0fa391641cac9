"""Text and chats to token ids, as the model's own files say; ids back to text.

From a GGUF file (its keys are read directly, see gguf_metadata.py) or a Hugging Face directory (tokenizer.json,
tokenizer_config.json, generation_config.json). Nothing here is written anywhere.

Special tokens inside a prompt's text ("<|im_end|>" typed by a user) become those tokens, as in llama.cpp's server and
in vLLM: whoever takes text from strangers passes it as chat messages at his own risk, or sends token ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from executor_svc import gguf_tokenizer
from executor_svc.chat_template import ChatTemplate, Message
from executor_svc.gguf_metadata import read_gguf_metadata
from executor_svc.pieces import Pieces
from jitney.columns import I32
from jitney.errors import InvalidRequest

_MARK = "\u2063splice%d\u2063"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a chat. `token_ids` of an assistant's: the ids that were generated, spliced in as they are."""

    role: str
    content: str
    token_ids: Sequence[int] = ()


class Tokenizer:
    """Safe from any thread. `digest` is over everything that it does to text."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_ids: Collection[int],
        adds_bos: int | None,
        template: ChatTemplate | None,
    ) -> None:
        """`adds_bos`: the id that a prompt given as text begins with, where the inner one does not add it itself."""
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        self._bos = adds_bos
        self.template = template
        self.pieces = Pieces(inner)
        self.eos_ids = frozenset(eos_ids)
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocabulary = 1 + max(vocabulary.values(), default=-1)
        self._longest = max((len(token.encode()) for token in vocabulary), default=1)
        described = [inner.to_str(), template.source if template else "", sorted(self.eos_ids), adds_bos]
        self.digest = hashlib.sha256(json.dumps(described).encode()).digest()

    def encode(self, text: str, *, special: bool = True) -> I32:
        """Token ids, [n] int32; with `special`, what the model wants around a bare prompt (BOS) is added."""
        ids = self._inner.encode_batch_fast([text], add_special_tokens=special)[0].ids
        if special and self._bos is not None:
            ids = [self._bos, *ids]
        return np.array(ids, np.int32)

    def least_tokens(self, text: str) -> int:
        """A lower bound on the tokens of `text`, from its size alone. A normaliser may shrink it, by a third or so."""
        slack = 1 if self._inner.normalizer is None else 4
        return len(text.encode()) // (slack * self._longest)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens all at once; special ones are skipped."""
        return self._inner.decode(list(token_ids), skip_special_tokens=True)

    def encode_chat(self, turns: Sequence[Turn]) -> I32:
        """Token ids of a conversation, up to where the assistant begins to answer; [n] int32.

        Where an assistant's message carries its ids, what stands before it is the very prompt that it answered, and
        the ids follow as they are: the prompt of each turn begins with the prompt and the answer of the one before,
        token by token, so that all of it is found in the cache. Raises InvalidRequest if the model has no template,
        or the template refuses.
        """
        if self.template is None:
            raise InvalidRequest("the model has no chat template: send text or token ids", field="chat")
        marks = _marks(turns)
        messages: list[Message] = [{"role": t.role, "content": marks.get(i, t.content)} for i, t in enumerate(turns)]
        parts: list[I32] = []
        before: int | None = None  # the last spliced message
        for index in [*marks, len(turns)]:
            text = self._rendered_up_to(messages, index)
            if before is not None:
                if text.count(marks[before]) != 1:
                    return self._without_splices(turns)
                text = text.partition(marks[before])[2]
            parts.append(self._joined(self.encode(text, special=False), parts))
            if index < len(turns):
                parts.append(np.array(turns[index].token_ids, np.int32))
                before = index
        return np.concatenate(parts)

    def _rendered_up_to(self, messages: Sequence[Message], index: int) -> str:
        """What the assistant saw before it wrote message `index`."""
        assert self.template is not None
        return self.template.render(messages[:index], add_generation_prompt=True)

    def _joined(self, segment: I32, parts: Sequence[I32]) -> I32:
        """The segment behind spliced ids, less the end-of-turn token that these ids end with already."""
        if len(parts) > 0 and len(segment) > 0 and len(parts[-1]) > 0:
            last = int(parts[-1][-1])
            if last in self.eos_ids and last == segment[0]:
                return segment[1:]
        return segment

    def _without_splices(self, turns: Sequence[Turn]) -> I32:
        """For a template that rewrites what an assistant said: the ids go in as their text."""
        assert self.template is not None
        messages: list[Message] = [
            {"role": t.role, "content": self.decode(t.token_ids) if t.token_ids else t.content} for t in turns
        ]
        return self.encode(self.template.render(messages, add_generation_prompt=True), special=False)


def _marks(turns: Sequence[Turn]) -> dict[int, str]:
    """A stand-in for each message with ids, that occurs in no message. The first message stays text: there is no
    prompt that it could have answered."""
    form = _MARK
    while any(form.split("%d")[0] in t.content for t in turns):
        form = "\u2063" + form
    return {i: form % i for i, t in enumerate(turns) if t.token_ids and i > 0}


def load_tokenizer(path: Path) -> Tokenizer:
    """Of a GGUF file, a Hugging Face directory, or a directory that holds one GGUF file. Raises InvalidRequest, in one
    sentence, if there is none."""
    if not path.is_dir():
        return _of_gguf(path)
    if not (path / "tokenizer.json").exists() and len(files := list(path.glob("*.gguf"))) == 1:
        return _of_gguf(files[0])
    return _of_directory(path)


def _of_gguf(path: Path) -> Tokenizer:
    keys = read_gguf_metadata(path)
    inner = gguf_tokenizer.build_tokenizer(keys, path)
    tokens = keys["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)

    def token_id(name: str) -> int | None:
        value = keys.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    bos, eos = token_id("bos"), token_id("eos")
    ends = {i for i in (eos, token_id("eot"), token_id("eom")) if i is not None}
    source = keys.get("tokenizer.chat_template")
    variables = {
        "bos_token": "" if bos is None else str(tokens[bos]),
        "eos_token": "" if eos is None else str(tokens[eos]),
    }
    template = ChatTemplate(source, variables) if isinstance(source, str) and source else None
    adds_bos = bos if gguf_tokenizer.adds_bos(keys) else None
    return Tokenizer(inner, eos_ids=ends, adds_bos=adds_bos, template=template)


def _of_directory(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise InvalidRequest(f"{directory} has no tokenizer.json", field="model", value=directory)
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare exceptions
        raise InvalidRequest(f"{file} is no tokenizer: {error}", field="model", value=file) from error
    config = _json(directory / "tokenizer_config.json")
    names = {key: _token_text(config.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    source = _template_source(directory, config)
    template = ChatTemplate(source, {k: v for k, v in names.items() if v}) if source else None
    return Tokenizer(inner, eos_ids=_eos_ids(directory, inner, names["eos_token"]), adds_bos=None, template=template)


def _eos_ids(directory: Path, inner: tokenizers.Tokenizer, name: str) -> set[int]:
    """generation_config.json knows best, then config.json; the tokenizer's own comes on top."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        value = _json(directory / file).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found |= {v for v in values if isinstance(v, int)}
        if found:
            break
    own = inner.token_to_id(name) if name else None
    return found | ({own} if own is not None else set())


def _template_source(directory: Path, config: Mapping[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # named templates
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _token_text(value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", field="model", value=file) from error
    return value if isinstance(value, dict) else {}
