"""Tokenizers of GGUF files and of directories, and chats: the ids of one turn begin those of the next."""

from __future__ import annotations

import functools
import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import pre_tokenizers

from executor_svc.chat_template import ChatTemplate
from executor_svc.gguf_metadata import Value, read_gguf_metadata
from executor_svc.gguf_tokenizer import SPACE, adds_bos, build_tokenizer
from executor_svc.tokenizer import Tokenizer, Turn, load_tokenizer
from jitney.errors import InvalidRequest
from jitney.models import default_model_path
from tests.support.tiny_llama import IM_END, make_tiny_llama

needs_model = pytest.mark.skipif(not default_model_path().is_file(), reason="the default model is not fetched")
LACKING = "\x04\x06\x13\x14\x16\x1d"  # control characters that the default model's vocabulary has no byte for
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@functools.cache
def real() -> Tokenizer:
    return load_tokenizer(default_model_path())


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


# The default model.


@needs_model
@pytest.mark.parametrize(
    "text, tokens",
    [
        ("  2024", ["ĠĠ", "2", "0", "2", "4"]),  # Digits splits first: the spaces stay together
        ("x  2024", ["x", "ĠĠ", "2", "0", "2", "4"]),
        (" 7", ["Ġ", "7"]),
        ("Hello world", ["Hello", "Ġworld"]),
        ("é", ["Ã©"]),
        ("<|im_end|>\n", ["<|im_end|>", "Ċ"]),
    ],
)
def test_known_tokens_of_the_default_model(text: str, tokens: Sequence[str]) -> None:
    vocabulary = read_gguf_metadata(default_model_path())["tokenizer.ggml.tokens"]
    assert isinstance(vocabulary, list)
    assert [vocabulary[i] for i in real().encode(text)] == tokens


@needs_model
def test_facts_of_the_default_model() -> None:
    tokenizer = real()
    assert tokenizer.vocabulary == 49152
    assert tokenizer.eos_ids == {2}
    assert tokenizer.template is not None
    assert tokenizer.encode("a").dtype == np.int32
    assert tokenizer.digest == load_tokenizer(default_model_path()).digest


@needs_model
@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters=LACKING), max_size=60))
def test_text_comes_back(text: str) -> None:
    """All but the characters of the bytes that the model's vocabulary lacks: those vanish, as in transformers."""
    tokenizer = real()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert len(ids) >= tokenizer.least_tokens(text)


@needs_model
@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab \n0123٤½é質.,'s", max_size=30))
def test_splits_as_the_transformers_tokenizer_of_the_model_family(text: str) -> None:
    """Digits one by one, then GPT-2's words: the pre-tokenizer of SmolLM2's own tokenizer.json."""
    words = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ).pre_tokenize_str(text)
    tokenizer = real()
    vocabulary = _vocabulary()
    ids = [i for word, _ in words for i in _bpe(word, vocabulary)]
    assert tokenizer.encode(text).tolist() == ids


@functools.cache
def _vocabulary() -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    keys = read_gguf_metadata(default_model_path())
    tokens, merges = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.merges"]
    assert isinstance(tokens, list) and isinstance(merges, list)
    pairs = {(str(m).split(" ")[0], str(m).split(" ")[1]): rank for rank, m in enumerate(merges)}
    return {str(t): i for i, t in enumerate(tokens)}, pairs


def _bpe(word: str, vocabulary: tuple[dict[str, int], dict[tuple[str, str], int]]) -> list[int]:
    """Byte-pair encoding as the paper says it: join the pair of least rank until there is none."""
    ids, ranks = vocabulary
    parts = list(word)
    while len(parts) > 1:
        rank, at = min((ranks.get((a, b), 1 << 30), i) for i, (a, b) in enumerate(itertools.pairwise(parts)))
        if rank == 1 << 30:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ids[p] for p in parts if p in ids]


@needs_model
def test_the_default_system_prompt_comes_from_the_template() -> None:
    expected = SYSTEM + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert real().encode_chat([Turn("user", "hi")]).tolist() == real().encode(expected).tolist()
    own = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    chat = real().encode_chat([Turn("system", "Be brief."), Turn("user", "hi")])
    assert chat.tolist() == real().encode(own).tolist()


@needs_model
def test_a_start_reads_little_and_writes_nothing(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to(default_model_path())
    load_tokenizer(link)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


# Templates, against transformers.

TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m.content | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": """
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content }}
        {%- set messages = messages[1:] %}
    {%- endif %}
    {% for m in messages %}
        {% if m.role == 'assistant' %}
[{% generation %}{{ m.content }}{% endgeneration %}]{{ eos_token }}
        {% else %}
            {% if loop.index0 is divisibleby 50 %}{% break %}{% endif %}
<{{ m.content | tojson }}>
        {% endif %}
    {% endfor %}""",
    "variables": "{{ bos_token }}{{ messages | length }}{% if tools is none %}no tools{% endif %}"
    "{% if documents %}documents{% endif %}{{ messages | map(attribute='content') | join('|') }}",
}


def _transformers(directory: Path, **names: str) -> Any:
    import transformers

    make: Any = transformers.PreTrainedTokenizerFast
    return make(tokenizer_file=str(directory / "tokenizer.json"), **names)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("generation", [True, False])
def test_templates_render_as_in_transformers(tiny_directory: Path, tmp_path: Path, name: str, generation: bool) -> None:
    messages = [
        {"role": "system", "content": "Sei höflich <&>"},
        {"role": "user", "content": ' "hi"\n'},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "質問"},
    ]
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    theirs = _transformers(tiny_directory, **names)
    expected = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=generation
    )
    ours = ChatTemplate(TEMPLATES[name], names).render(messages, add_generation_prompt=generation)
    assert ours == expected


@needs_model
def test_the_default_template_renders_as_in_transformers(tiny_directory: Path) -> None:
    template = real().template
    assert template is not None
    theirs = _transformers(tiny_directory)
    for messages in (
        [{"role": "user", "content": "hi"}],
        [
            {"role": "system", "content": "x"},
            {"role": "user", "content": " hi "},
            {"role": "assistant", "content": "y"},
        ],
    ):
        expected = theirs.apply_chat_template(
            messages, chat_template=template.source, tokenize=False, add_generation_prompt=True
        )
        assert template.render(messages, add_generation_prompt=True) == expected


@pytest.mark.parametrize(
    "source, what",
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content.foo.bar }}", "no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(tiny_directory: Path, source: str, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert caught.value.field == "chat"


# Splicing.

words = st.text(alphabet="ab <|>im_end\n é", max_size=12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(words, st.lists(st.integers(0, 511), max_size=8), st.booleans()), min_size=1, max_size=6))
def test_each_turn_begins_with_the_turn_before(tiny: Tokenizer, rounds: list[tuple[str, list[int], bool]]) -> None:
    turns = [Turn("system", "s")]
    before: list[int] = []
    for asked, generated, ends in rounds:
        turns.append(Turn("user", asked))
        prompt = tiny.encode_chat(turns).tolist()
        assert prompt[: len(before)] == before
        answer = [*generated, IM_END] if ends or not generated else generated
        before = prompt + answer
        turns.append(Turn("assistant", "", answer))


@pytest.fixture(scope="module")
def tiny(tiny_directory: Path) -> Tokenizer:
    return load_tokenizer(tiny_directory)


def test_the_end_of_turn_is_not_doubled(tiny: Tokenizer) -> None:
    first = tiny.encode_chat([Turn("user", "a")]).tolist()
    turns = [Turn("user", "a"), Turn("assistant", "not used", [70, 71, IM_END]), Turn("user", "b")]
    tail = tiny.encode("<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n").tolist()
    assert tiny.encode_chat(turns).tolist() == [*first, 70, 71, *tail]
    turns[1] = Turn("assistant", "", [70, 71])  # ended by length or by a stop string
    assert tiny.encode_chat(turns).tolist() == [*first, 70, 71, *tail]


def test_spliced_ids_are_those_that_text_would_give(tiny: Tokenizer) -> None:
    ids = tiny.encode("plain").tolist()
    spliced = [Turn("user", "a"), Turn("assistant", "", ids), Turn("user", "b")]
    plain = [Turn("user", "a"), Turn("assistant", "plain"), Turn("user", "b")]
    assert tiny.encode_chat(spliced).tolist() == tiny.encode_chat(plain).tolist()


def test_messages_cannot_forge_a_splice(tiny: Tokenizer) -> None:
    mark = "\u2063splice1\u2063"
    turns = [Turn("user", mark), Turn("assistant", "", [70, IM_END]), Turn("user", mark + "\u2063" + mark)]
    ids = tiny.encode_chat(turns).tolist()
    assert ids.count(70) == 1 + tiny.encode(mark + mark + mark).tolist().count(70)
    assert tiny.decode(ids).count(mark) == 3


def test_an_assistants_first_word_is_kept_as_it_is_said(tiny: Tokenizer) -> None:
    ids = tiny.encode_chat([Turn("assistant", "kept", [70]), Turn("user", "b")])
    assert "kept" in tiny.decode(ids.tolist())


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",  # drops the answers
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_rewrites_answers_gets_text(tiny_directory: Path, tmp_path: Path, template: str) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_directory / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path)
    said = tokenizer.encode("said").tolist()
    spliced = tokenizer.encode_chat([Turn("user", "a"), Turn("assistant", "", said), Turn("user", "b")])
    plain = tokenizer.encode_chat([Turn("user", "a"), Turn("assistant", "said"), Turn("user", "b")])
    assert spliced.tolist() == plain.tolist()


# Directories.


def test_a_directory_and_its_special_ids(tiny_directory: Path, tmp_path: Path) -> None:
    assert load_tokenizer(tiny_directory).eos_ids == {IM_END}
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_directory / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "<|im_start|>"},
                "chat_template": [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}],
            }
        )
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_ids == {0, 1, 2}
    assert tokenizer.template is not None and tokenizer.template.source == "d"
    assert tokenizer.digest != load_tokenizer(tiny_directory).digest


@pytest.mark.parametrize(
    "files, what",
    [
        ({}, "has no tokenizer.json"),
        ({"tokenizer.json": "{"}, "is no tokenizer"),
        ({"tokenizer_config.json": "{"}, "cannot be read"),
        ({"chat_template.jinja": "{% if %}"}, "does not compile"),
    ],
)
def test_a_broken_directory_is_refused_in_one_sentence(
    tiny_directory: Path, tmp_path: Path, files: Mapping[str, str], what: str
) -> None:
    if files:
        (tmp_path / "tokenizer.json").write_bytes((tiny_directory / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidRequest, match=what):
        load_tokenizer(tmp_path)


def test_a_model_without_a_template_takes_no_chat(tiny_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_directory / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidRequest, match="no chat template"):
        load_tokenizer(tmp_path).encode_chat([Turn("user", "a")])


# GGUF files.

_TYPES: dict[type, tuple[int, str]] = {bool: (7, "?"), int: (5, "i"), float: (6, "f")}


def gguf(keys: Mapping[str, Value], version: int = 3) -> bytes:
    """The key part of a file."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def typed(value: Value) -> tuple[int, bytes]:
        if isinstance(value, str):
            return 8, string(value)
        if isinstance(value, list):
            kinds = [typed(v) for v in value]
            kind = kinds[0][0] if kinds else 4
            return 9, struct.pack("<IQ", kind, len(value)) + b"".join(data for _, data in kinds)
        kind, code = _TYPES[type(value)]
        return kind, struct.pack("<" + code, value)

    parts = [b"GGUF", struct.pack("<IQQ", version, 0, len(keys))]
    for key, value in keys.items():
        kind, data = typed(value)
        parts += [string(key), struct.pack("<I", kind), data]
    return b"".join(parts)


def test_every_kind_of_key_is_read(tmp_path: Path) -> None:
    keys: dict[str, Value] = {
        "a": "täxt",
        "b": -5,
        "c": 0.5,
        "d": True,
        "e": ["x", "", "ü"],
        "f": [1, 2, 3],
        "g": [0.5, 1.5],
        "h": [],
        "i": [[1, 2], [3]],
    }
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf(keys) + b"tensors")
    assert read_gguf_metadata(file) == keys


@pytest.mark.parametrize(
    "data, what",
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a zip file", "no GGUF file"),
        (gguf({}, version=1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 50), "cannot be"),
    ],
)
def test_a_foreign_file_is_refused_in_one_sentence(tmp_path: Path, data: bytes, what: str) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(InvalidRequest, match=what) as caught:
        read_gguf_metadata(file)
    assert "\n" not in caught.value.message


@given(st.data())
def test_a_truncated_file_is_refused_wherever_it_ends(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = gguf({"tokens": ["a", "bc", "def"], "numbers": [1, 2, 3], "flag": True})
    file = tmp_path_factory.mktemp("cut") / "x.gguf"
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(InvalidRequest):
        read_gguf_metadata(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*No such file"):
        load_tokenizer(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    "change, what",
    [
        ({"tokenizer.ggml.model": "wordpiece"}, 'kind "wordpiece"'),
        ({"tokenizer.ggml.pre": "martian"}, 'pre-tokenizer "martian"'),
        ({"tokenizer.ggml.tokens": []}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": []}, "has no tokenizer.ggml.merges"),
    ],
)
def test_unknown_tokenizers_are_refused(change: dict[str, Value], what: str) -> None:
    keys: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    build_tokenizer(keys, Path("x.gguf"))
    with pytest.raises(InvalidRequest, match=what):
        build_tokenizer(keys | change, Path("x.gguf"))


@pytest.mark.parametrize(
    "pre, digits", [("smollm", "1|2|3|4"), ("qwen2", "1|2|3|4"), ("llama-bpe", "123|4"), ("gpt-2", "1234")]
)
def test_pre_tokenizers_split_digits_as_named(pre: str, digits: str) -> None:
    keys: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    splitter: Any = build_tokenizer(keys, Path("x.gguf")).pre_tokenizer
    assert "|".join(word for word, _ in splitter.pre_tokenize_str("1234")) == digits


def test_bos_is_added_to_text_where_the_file_says_so(tmp_path: Path) -> None:
    keys: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf(keys))
    assert load_tokenizer(tmp_path).digest == load_tokenizer(file).digest
    tokenizer = load_tokenizer(file)
    assert tokenizer.encode("ab").tolist() == [0, 3]
    assert tokenizer.encode_chat([Turn("user", "ab")]).tolist() == [0, 3]
    assert adds_bos({"tokenizer.ggml.model": "llama"}) and adds_bos({"tokenizer.ggml.pre": "llama-bpe"})
    assert not adds_bos({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"})


@settings(max_examples=100)
@given(
    st.lists(st.text(alphabet="ab" + SPACE, min_size=2, max_size=5), unique=True, max_size=12),
    st.text("ab c", max_size=16),
)
def test_sentence_piece_joins_the_best_neighbours_first(words: list[str], text: str) -> None:
    singles = ["a", "b", SPACE]
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *singles, *words]
    types = [2] + [6] * 256 + [1] * (3 + len(words))
    scores = [0.0] * 257 + [-100.0] * 3 + [-float(i) for i in range(len(words))]
    keys: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.add_space_prefix": False,
    }
    inner: Inner = build_tokenizer(keys, Path("x.gguf"))
    assert inner.encode(text).tokens == _sentence_piece(
        text.replace(" ", SPACE), dict(zip(tokens, scores, strict=True))
    )


def _sentence_piece(text: str, scores: dict[str, float]) -> list[str]:
    """Join the neighbours whose union scores highest, leftmost first, until no union is a token."""
    parts = list(text)
    while True:
        unions = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not unions:
            break
        at = min(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [t for p in parts for t in ([p] if p in scores else [f"<0x{b:02X}>" for b in p.encode()])]
