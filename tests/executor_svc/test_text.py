# ruff: noqa: RUF001 (text in many scripts is what this is about)
"""Text of answers: equal to decoding everything at once, always whole characters, stop strings never shown."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

from executor_svc.gguf_tokenizer import SPACE, build_tokenizer
from executor_svc.pieces import Pieces
from executor_svc.stop_strings import StopStrings
from executor_svc.text import AnswerText
from jitney.errors import InvalidRequest

REAL_TEXTS = (
    "The quick brown fox jumps over 2024 lazy dogs.",
    "  2024   spaces\n\n\tand\r\nlines ",
    "Grüße aus Köln, ça va? Ça n'a pas d'importance… «Здравствуй, мир» Γειά σου Κόσμε",
    "質問があります。日本語と中文，한국어도 됩니다。",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก ሰላም",
    "👩‍👩‍👧‍👦 🇩🇪🏴‍☠️ 🤷🏽‍♀️ e\u0301 a\u0308 \u200f\u202eabc\ufffd\ufeff 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    "def f(x):\n    return {'a': [1, 2, 3]}  # ✓",
)
STOP_ALPHABET = "abé"


@functools.cache
def byte_level() -> Inner:
    """A byte-level BPE with merges inside and across characters, and special tokens."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|a|>", "<|b|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(REAL_TEXTS * 3, trainer)
    inner.add_tokens(["plain added ☃"])
    return inner


@functools.cache
def sentence_piece(space_prefix: bool = True) -> Inner:
    """A SentencePiece vocabulary: specials, 256 bytes, then letters and words by falling score."""
    words = [
        "e",
        "t",
        "a",
        "o",
        "h",
        "n",
        "l",
        "r",
        SPACE,
        "d",
        "s",
        "質",
        "é",
        "th",
        "the",
        SPACE + "the",
        "er",
        SPACE * 2,
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    return build_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": list(tokens),
            "tokenizer.ggml.token_type": list(types),
            "tokenizer.ggml.scores": list(scores),
            "tokenizer.ggml.add_space_prefix": space_prefix,
        },
        __file__,  # type: ignore[arg-type]
    )


def streamed(inner: Inner, ids: Sequence[int]) -> str:
    """One token at a time; checks on the way that every piece is valid text."""
    text = AnswerText(Pieces(inner))
    parts = []
    for token_id in ids:
        assert text.push([token_id]) is None
        parts.append(text.take())
        parts[-1].encode()  # raises on a lone half
    parts.append(text.finish())
    assert text.take() == ""
    return "".join(parts)


@pytest.mark.parametrize("sample", REAL_TEXTS)
@pytest.mark.parametrize("make", [byte_level, sentence_piece, functools.partial(sentence_piece, False)])
def test_real_text_streams_as_it_decodes_at_once(make: functools.partial[Inner], sample: str) -> None:
    inner = make()
    ids = inner.encode(sample).ids
    assert inner.decode(ids) == sample
    assert streamed(inner, ids) == sample


@given(st.lists(st.integers(0, 600), max_size=60))
def test_random_ids_of_a_byte_level_tokenizer_stream_as_they_decode_at_once(ids: list[int]) -> None:
    inner = byte_level()
    assert streamed(inner, ids) == inner.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 276), max_size=60), st.booleans())
def test_random_ids_of_a_sentence_piece_tokenizer(ids: list[int], space_prefix: bool) -> None:
    inner = sentence_piece(space_prefix)
    pieces = Pieces(inner)
    expected = b"".join(pieces.of(i) for i in ids).decode("utf-8", "replace")
    if space_prefix:
        expected = expected.removeprefix(" ")
    assert streamed(inner, ids) == expected
    at_once = inner.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in expected + at_once:
        assert expected == at_once


def test_ids_outside_the_vocabulary_give_no_text() -> None:
    assert streamed(byte_level(), [70_000, 5]) == byte_level().decode([5])


def test_a_character_comes_when_its_last_byte_is_there() -> None:
    inner = sentence_piece()
    text = AnswerText(Pieces(inner))
    seen = []
    for byte in "é☃".encode():
        text.push([3 + byte])
        seen.append(text.take())
    assert seen == ["", "é", "", "", "☃"]


def test_bytes_that_never_become_a_character_are_replaced() -> None:
    text = AnswerText(Pieces(sentence_piece()))
    text.push([3 + 0xE2, 3 + 0x98])
    assert text.take() == ""
    assert text.finish() == "\ufffd"


def test_hidden_ids_give_no_text() -> None:
    inner = byte_level()
    ids = inner.encode("fox dogs").ids
    text = AnswerText(Pieces(inner), hidden_ids={ids[-1]})
    text.push(ids)
    assert text.finish() == inner.decode(ids[:-1])


def test_a_foreign_decoder_is_refused() -> None:
    inner = Inner(models.BPE())
    inner.decoder = decoders.WordPiece()
    with pytest.raises(InvalidRequest, match="decodes by WordPiece"):
        Pieces(inner)


# Stop strings.


def first_match(text: str, stops: Sequence[str]) -> tuple[str, str] | None:
    """By trying all: the match that ends first, of those the longest; with the text before it."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return longest, text[: end - len(longest)]
    return None


def could_become_stop(text: str, stops: Sequence[str]) -> int:
    """Characters at the end that begin some stop string."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


letters = st.text(STOP_ALPHABET, max_size=40)
stop_lists = st.lists(st.text(STOP_ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=300)
@given(letters, stop_lists, st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_stop_strings_are_found_as_by_trying_all(sample: str, stops: list[str], cuts: list[int]) -> None:
    inner = sentence_piece(space_prefix=False)
    data = sample.encode()
    text = AnswerText(Pieces(inner), StopStrings(stops))
    shown, at, matched = "", 0, None
    for size in itertools.cycle(cuts):
        if at >= len(data) or matched is not None:
            break
        matched = text.push([3 + b for b in data[at : at + size]])
        at += size
        shown += text.take()
        so_far = data[:at].decode("utf-8", "ignore")
        if matched is None:
            assert first_match(so_far, stops) is None
            assert shown == so_far[: len(so_far) - could_become_stop(so_far, stops)]
        else:
            assert first_match(so_far, stops) == (matched, shown)
    if matched is None:
        assert shown + text.finish() == sample
    else:
        assert text.finish() == ""
        assert text.push([3 + 97]) == matched


def test_what_looked_like_a_stop_string_comes_when_it_is_none() -> None:
    text = AnswerText(Pieces(sentence_piece()), StopStrings(["aab"]))
    pushed = []
    for letter in "aaac":
        text.push([3 + ord(letter)])
        pushed.append(text.take())
    assert pushed == ["", "", "a", "aac"]


def test_a_stop_string_across_tokens_and_bytes() -> None:
    text = AnswerText(Pieces(sentence_piece()), StopStrings(["é質"]))
    assert text.push([3 + b for b in "aé".encode()]) is None
    assert text.take() == "a"
    data = "質b".encode()
    assert text.push([3 + data[0], 3 + data[1]]) is None
    assert text.push([3 + b for b in data[2:]]) == "é質"
    assert (text.take(), text.finish()) == ("", "")


# Resuming.


@settings(max_examples=200)
@given(letters, stop_lists, st.data())
def test_text_restarts_where_the_reader_stood(sample: str, stops: list[str], data: st.DataObject) -> None:
    ids = [3 + b for b in sample.encode()]
    whole = AnswerText(Pieces(sentence_piece(False)), StopStrings(stops))
    cut = data.draw(st.integers(0, len(ids)))
    if whole.push(ids) is not None:
        return
    certain = AnswerText(Pieces(sentence_piece(False)), StopStrings(stops))
    certain.push(ids[:cut])
    received = data.draw(st.sampled_from([certain.take()[:n] for n in range(cut + 1)]))
    again = AnswerText(Pieces(sentence_piece(False)), StopStrings(stops))
    again.push(ids[:cut])
    assert again.restart_after(len(received.encode()))
    again.push(ids[cut:])
    assert received + again.take() + again.finish() == sample


@pytest.mark.parametrize("received, fits", [(0, True), (1, True), (2, False), (3, True), (4, True), (5, False)])
def test_text_restarts_only_between_characters(received: int, fits: bool) -> None:
    text = AnswerText(Pieces(sentence_piece()), StopStrings(["ab"]))
    text.push([3 + b for b in "xéa".encode()])
    assert text.restart_after(received) is fits
    if fits:
        text.push([3 + ord("c")])
        assert text.finish() == "xéac".encode()[received:].decode()
