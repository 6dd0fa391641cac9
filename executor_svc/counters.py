"""What the executor has done since it started, and its newest steps."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from jitney.columns import I64
from jitney.snapshot import Outcome


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that ran. `decide_us` 0: it coasted."""

    step: int
    at_us: int
    rows: int
    tokens: int
    prefill_tokens: int
    step_us: int
    decide_us: int
    waiting: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class Served:
    """Tokens served to one tenant."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


def _zeros() -> I64:
    return np.zeros(64, np.int64)


@dataclass(slots=True)
class ServedTokens:
    """Tokens served, by tenant number, [capacity] each: the columns grow."""

    prompt: I64 = field(default_factory=_zeros)
    cached: I64 = field(default_factory=_zeros)
    generated: I64 = field(default_factory=_zeros)

    def reach(self, tenants: int) -> None:
        """Makes room for so many."""
        missing = tenants - len(self.prompt)
        if missing > 0:
            more = np.zeros(max(missing, len(self.prompt)), np.int64)
            self.prompt, self.cached, self.generated = (
                np.concatenate((column, more)) for column in (self.prompt, self.cached, self.generated)
            )


@dataclass(slots=True)
class Counters:
    """Totals; written by the loop, read by anyone."""

    decisions: int = 0
    coasted_steps: int = 0
    preemptions: int = 0
    substituted: int = 0  # rows that a substitute took over at the boundary
    cache_reopenings: int = 0
    stalled_rows: int = 0  # row-steps that sat out for want of a block
    computed_tokens: int = 0  # every token that a step computed
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=65536))
    decide_us: deque[int] = field(default_factory=lambda: deque(maxlen=1024))
    served: ServedTokens = field(default_factory=ServedTokens)

    def of_tenant(self, tenant: int) -> Served:
        """What a tenant was served."""
        self.served.reach(tenant + 1)
        columns = (self.served.prompt, self.served.cached, self.served.generated)
        return Served(*(int(column[tenant]) for column in columns))
