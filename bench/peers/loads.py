"""What is asked of everybody: prompts as token ids, lengths of answers, times of arrival.

Lengths are the same in every round; the ids of the prompts are other ones each time, so that nobody's prefix cache
finds the prompts of an earlier round.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

REQUESTS: Final = 64
LEAST_REQUESTS: Final = 4
SHORTER: Final = 4  # prompts and answers of a trial are so many times shorter
SPARE_TOKENS: Final = 16
FIRST_ID: Final = 300  # ids below are special tokens and single bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: generated to its full length, greedily."""

    prompt_ids: tuple[int, ...]
    new_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """A kind of load: ranges are inclusive. `one_by_one`: the next is sent when the last has ended. `prefill`: what is
    measured is the prompt. `fixed_slots`: with how many slots it is run; 0: with the best."""

    name: str
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    requests: int = REQUESTS
    one_by_one: bool = False
    poisson: bool = False
    fixed_slots: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.prompt_tokens[1] + self.new_tokens[1]

    @property
    def prefill(self) -> bool:
        """Whether what is measured is the prompt."""
        return self.new_tokens[1] == 1

    @property
    def scaled(self) -> bool:
        """Whether it has fewer requests in a smaller run."""
        return not self.one_by_one and not self.fixed_slots


LOADS: Final = {
    load.name: load
    for load in (
        Load("decode_heavy", (16, 64), (16, 256)),
        Load("mixed", (16, 512), (16, 256)),
        Load("poisson", (16, 512), (16, 256), poisson=True),
        Load("batch1", (32, 32), (128, 128), requests=2, one_by_one=True, fixed_slots=1),
        Load("prefill_512", (512, 512), (1, 1), requests=2, one_by_one=True, fixed_slots=1),
        Load("prefill_2048", (2048, 2048), (1, 1), requests=1, one_by_one=True, fixed_slots=1),
        Load("batch32", (192, 192), (128, 128), requests=32, fixed_slots=32),
    )
}


def asks(load: Load, round_number: int, vocabulary: int, scale: float = 1.0, per_s: float = 0.0) -> list[Ask]:
    """The requests of one round. `scale` is of their number; `per_s` the mean rate of arrivals of a Poisson load."""
    count = max(LEAST_REQUESTS, round(load.requests * scale)) if load.scaled else load.requests
    lengths = np.random.default_rng(zlib.crc32(load.name.encode()))
    prompts = _spread(lengths, load.prompt_tokens, count)
    answers = _spread(lengths, load.new_tokens, count)
    gaps = lengths.exponential(1.0, count)
    arrivals = np.cumsum(gaps) * (count / gaps.sum()) / per_s if load.poisson else np.zeros(count)
    ids = np.random.default_rng((zlib.crc32(load.name.encode()), round_number))
    return [
        Ask(tuple(ids.integers(FIRST_ID, vocabulary, prompt).tolist()), answer, float(arrival))
        for prompt, answer, arrival in zip(prompts, answers, arrivals, strict=True)
    ]


def _spread(draw: np.random.Generator, span: tuple[int, int], count: int) -> list[int]:
    """Evenly spread over the span, ends included, in random order: a small run has the same mean as a large one."""
    values = np.rint(np.linspace(*span, count)).astype(int)
    return [int(value) for value in draw.permutation(values)]


def context_tokens(load: Load) -> int:
    """Of a slot: servers with as many slots serve loads of the same context in turn."""
    alike = [other for other in LOADS.values() if load.fixed_slots == 1 == other.fixed_slots] or [load]
    return max(other.longest for other in alike) + SPARE_TOKENS


def trial(load: Load, round_number: int, vocabulary: int, scale: float = 1.0) -> list[Ask]:
    """As many requests with everything shorter, all at once: to find the best number of slots."""
    return [
        Ask(ask.prompt_ids[: max(4, len(ask.prompt_ids) // SHORTER)], max(4, ask.new_tokens // SHORTER))
        for ask in asks(load, round_number, vocabulary, scale, per_s=1.0)
    ]


def mean_new_tokens(load: Load) -> float:
    """Of an answer."""
    return sum(load.new_tokens) / 2


def climb(measured: dict[int, float], candidates: Sequence[int]) -> int | None:
    """The number of slots to try next, None once the best is known: from the middle uphill, as far as it goes up.

    `measured` is tokens/s by slots. Neighbours of the best so far are tried; what lies behind a worse one is not.
    """
    known = {slots: rate for slots, rate in measured.items() if slots in candidates}
    if not known:
        return candidates[len(candidates) // 2]
    at = candidates.index(max(known, key=lambda slots: known[slots]))
    for neighbour in (at - 1, at + 1):
        if 0 <= neighbour < len(candidates) and candidates[neighbour] not in known:
            return candidates[neighbour]
    return None
