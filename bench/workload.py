"""The requests of `bench.decide`, the same for both sides. Imports nothing of Jitney: vLLM's side reads it too."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 16
CONTEXT_TOKENS = 4096
POOL_BLOCKS = 131_072
STEP_TOKENS = 8192
TENANTS = 1000
ENDPOINTS = 8
VOCABULARY = 32_000
PROMPT_TOKENS = (16, 240)
NEW_TOKENS = (16, 800)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    number: int
    prompt_ids: NDArray[np.int32]
    max_tokens: int
    tenant: int
    endpoint: int
    priority: int


class Workload:
    """Requests without common prefixes: lengths spread evenly, a thousand tenants, one in ten of a higher priority."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._number = 0

    def next(self) -> Asked:
        """One more."""
        draw = self._random
        self._number += 1
        prompt = draw.randint(*PROMPT_TOKENS)
        ids = np.frombuffer(draw.randbytes(4 * prompt), np.uint32) % VOCABULARY
        return Asked(
            number=self._number,
            prompt_ids=ids.astype(np.int32),
            max_tokens=draw.randint(*NEW_TOKENS),
            tenant=draw.randrange(TENANTS),
            endpoint=draw.randrange(ENDPOINTS),
            priority=10 if draw.random() < 0.1 else 0,
        )
