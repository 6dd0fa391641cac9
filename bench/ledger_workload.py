"""The requests of `bench.ledger`, the same for both sides. Imports nothing of Jitney: vLLM's side reads it too.

Of 256 rows with prompts of 512 blocks and a half and answers of 64 tokens, four end in each step and four are admitted,
16 complete a block and 16 begin one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 16
ROWS = 256
PROMPT_BLOCKS = 512
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + BLOCK_TOKENS // 2
ANSWER_TOKENS = 64
ADMITTED_A_STEP = ROWS // ANSWER_TOKENS
POOL_BLOCKS = 163_840
CONTEXT_TOKENS = 16_384
VOCABULARY = 32_000
WARM_UP_STEPS = 2 * ANSWER_TOKENS
PREFIXES = 32
"""So many prefixes are in use; request n begins with number n % PREFIXES."""


def prompt(number: int, common_blocks: int) -> NDArray[np.int32]:
    """The prompt of request `number`, of which the first `common_blocks` blocks are a common prefix."""
    common = _drawn(number % PREFIXES, common_blocks * BLOCK_TOKENS)
    own = _drawn(PREFIXES + number, PROMPT_TOKENS - len(common))
    return np.concatenate((common, own))


def _drawn(seed: int, count: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, np.int32)
