"""The tokenizer that a GGUF file describes, rebuilt with the `tokenizers` package.

Two families: byte-level BPE ("gpt2": tokens and merges, with a named pre-tokenizer) and SentencePiece BPE ("llama":
tokens and scores, from which the merges follow). What a name stands for: `llama-vocab.cpp` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from executor_svc.gguf_metadata import Value
from jitney.errors import InvalidRequest

DIGITS_THEN_GPT2 = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
QWEN2 = ("qwen2", "deepseek-r1-qwen", "megrez")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "\u2581"  # how SentencePiece writes a space


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(keys: Mapping[str, Value], path: Path) -> Tokenizer:
    """The tokenizer of the file's keys. Raises InvalidRequest for a kind that is not known."""
    tokens = cast(list[str], _needed(keys, "tokenizer.ggml.tokens", path))
    types = cast(list[int], keys.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens))
    family = keys.get("tokenizer.ggml.model")
    if family == "gpt2":
        merges = cast(list[str], _needed(keys, "tokenizer.ggml.merges", path))
        tokenizer = _byte_level(tokens, merges, str(keys.get("tokenizer.ggml.pre", "")), path)
    elif family == "llama":
        scores = cast(list[float], _needed(keys, "tokenizer.ggml.scores", path))
        tokenizer = _sentence_piece(tokens, types, scores, bool(keys.get("tokenizer.ggml.add_space_prefix", True)))
    else:
        raise InvalidRequest(
            f'{path} has a tokenizer of kind "{family}", known are "gpt2" and "llama"',
            field="tokenizer.ggml.model",
            limit="gpt2, llama",
            value=family,
        )
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        chosen = [t for t, k in zip(tokens, types, strict=True) if k == kind]
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in chosen])
    return tokenizer


def adds_bos(keys: Mapping[str, Value]) -> bool:
    """Whether a prompt given as text begins with the BOS token."""
    by_family = keys.get("tokenizer.ggml.model") == "llama" or keys.get("tokenizer.ggml.pre") in LLAMA3
    return bool(keys.get("tokenizer.ggml.add_bos_token", by_family))


def _byte_level(tokens: Sequence[str], merges: Sequence[str], name: str, path: Path) -> Tokenizer:
    pairs = [cast(tuple[str, str], tuple(m.split(" ", 1))) for m in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=name in LLAMA3))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in DIGITS_THEN_GPT2:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif name in GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name in LLAMA3 or name in QWEN2:
        pattern = Regex(_WORDS % (r"\p{N}{1,3}" if name in LLAMA3 else r"\p{N}"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), whole])
    else:
        raise InvalidRequest(
            f'{path} names the pre-tokenizer "{name}", which is not known here',
            field="tokenizer.ggml.pre",
            limit=", ".join((*DIGITS_THEN_GPT2, *GPT2, *LLAMA3, *QWEN2)),
            value=name,
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], space_prefix: bool
) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((t for t, k in zip(tokens, types, strict=True) if k == TokenType.UNKNOWN), None)
    model = models.BPE(
        vocab=vocabulary,
        merges=merges_of_scores(tokens, types, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    written = normalizers.Replace(" ", SPACE)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), written])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = written
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_of_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece BPE joins the neighbours whose union scores highest: as merges, best first."""
    normal = {t for t, k in zip(tokens, types, strict=True) if k in (TokenType.NORMAL, TokenType.USER_DEFINED)}
    ranked: list[tuple[float, int, str, str]] = []
    for index, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        if token not in normal:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-score, index, left, right))
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _needed(keys: Mapping[str, Value], key: str, path: Path) -> Value:
    value = keys.get(key)
    if not value:
        raise InvalidRequest(f"{path} has no {key}: it holds no tokenizer", field=key, value=path)
    return value
