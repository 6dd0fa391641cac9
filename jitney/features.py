"""Prompt signals: what the wording of a prompt says about the length of its answer, counted, never the words.

Eight counts of 8 bits in one uint64, saturating at 255; zero means "none seen". The executor counts, the scheduler
reads. Phrases in English, German, French, Spanish, Italian and Portuguese; one table, so that another language is a
line. Loads without gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_COUNT: Final = 255
FEATURE_BITS: Final = 8
MAX_TEXT: Final = 32_768
"""Only the first half and the last half of so many characters are looked at: a question stands at an end."""


class Feature(IntEnum):
    """Place of each count: bits 8 * feature to 8 * feature + 7."""

    BRIEF = 0  # "briefly", "in one word", "yes or no"
    LONG = 1  # "in detail", "essay", "step by step"
    LIST = 2  # "list", "steps", "examples", bullets
    CODE = 3  # code fences, "function", "script"
    QUESTION = 4  # question marks
    NUMBER_ASKED = 5  # the largest "N words", "N sentences", "N items" asked for, as its log2 times 8
    LENGTH = 6  # log2 of the characters, times 8
    TURNS = 7  # messages of a chat


PHRASES: Final[dict[Feature, str]] = {
    Feature.BRIEF: (
        r"brief(?:ly)?|short(?:ly)?|concise(?:ly)?|one[- ]word|in one sentence|yes or no|only the|just the|tl;?dr"
        r"|summar\w+"
        r"|kurz|knapp|in einem (?:wort|satz)|ja oder nein|nur d(?:ie|en|as)|zusammenfass\w*"
        r"|bref|brièvement|en un mot|en une phrase|oui ou non|résum\w*"
        r"|breve(?:mente)?|en una palabra|en una frase|sí o no|resum\w*"
        r"|in una parola|in una frase|sì o no|riassum\w*|em uma palavra|sim ou não"
    ),
    Feature.LONG: (
        r"in detail|detailed|explain|elaborate|comprehensive|thorough(?:ly)?|step[- ]by[- ]step|essay|story|article"
        r"|report"
        r"|ausführlich|erklär\w*|schritt für schritt|aufsatz|geschichte|bericht"
        r"|en détail|détaillé\w*|expliqu\w*|étape par étape|histoire|rédaction"
        r"|en detalle|detallad\w*|explic\w*|paso a paso|historia|ensayo"
        r"|in dettaglio|dettagliat\w*|spieg\w*|passo dopo passo|racconto|em detalhes?|detalhad\w*|história"
    ),
    Feature.LIST: (
        r"list|bullet|enumerate|steps|examples|ideas|reasons|ways|table"
        r"|liste|aufzähl\w*|schritte|beispiele|ideen|gründe|exemples|idées|raisons|lista|ejemplos|razones|esempi|exemplos"
    ),
    Feature.CODE: (
        r"```|function|script|program|code|class|implement|regex|sql|python|javascript|rust|java|funktion|programm"
        r"|fonction|función|programa|funzione|função"
    ),
}
_PATTERNS: Final = {
    feature: re.compile(rf"(?<!\w)(?:{words})(?!\w)" if feature is not Feature.CODE else rf"(?:{words})", re.IGNORECASE)
    for feature, words in PHRASES.items()
}
_ASKED: Final = re.compile(
    r"(\d{1,5})[\s-]*(?:words?|sentences?|paragraphs?|lines?|items?|points?|wörter|worte|sätze|mots|phrases"
    r"|palabras|frases|parole|frasi|palavras)",
    re.IGNORECASE,
)
_QUESTIONS: Final = re.compile(r"[?\u037e\u061f\uff1f]")


def count(texts: Sequence[str]) -> int:
    """The packed counts of a prompt, given as its messages (one for plain text)."""
    text = "\n".join(texts)
    size = len(text)
    if size > MAX_TEXT:
        text = text[: MAX_TEXT // 2] + "\n" + text[-MAX_TEXT // 2 :]
    counts = {feature: len(pattern.findall(text)) for feature, pattern in _PATTERNS.items()}
    counts[Feature.QUESTION] = len(_QUESTIONS.findall(text))
    asked = max((int(number) for number in _ASKED.findall(text)), default=0)
    counts[Feature.NUMBER_ASKED] = log2_times_8(asked)
    counts[Feature.LENGTH] = log2_times_8(size)
    counts[Feature.TURNS] = len(texts)
    return sum(min(MAX_COUNT, value) << (FEATURE_BITS * feature) for feature, value in counts.items())


def log2_times_8(value: int) -> int:
    """floor(8 * log2(value)) for value >= 1, by integers alone; 0 for 0 and 1."""
    if value < 1:
        return 0
    return (value**8).bit_length() - 1


def unpack(packed: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Counts as int64 `[rows, 8]`, columns in the order of Feature."""
    shifts = np.arange(0, 64, FEATURE_BITS, dtype=np.uint64)
    unpacked: NDArray[np.int64] = ((packed[:, None] >> shifts) & np.uint64(MAX_COUNT)).astype(np.int64)
    return unpacked
