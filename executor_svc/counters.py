"""What the executor has done since it started, and its newest steps."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Served:
    """Tokens served to one tenant."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


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
    served: dict[int, Served] = field(default_factory=dict)

    def of_tenant(self, tenant: int) -> Served:
        """What a tenant was served."""
        return self.served.setdefault(tenant, Served())
