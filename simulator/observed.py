"""What snapshots and decisions tell of a run: each request's life, and what was done for whom.

The same observer looks at a recorded log and at a simulated run, so that both are measured alike. A time is that of
the snapshot that first shows the thing, so it is known to a step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np

from jitney.columns import RunningTable, WaitingTable
from jitney.decision import Decision
from jitney.snapshot import Outcome, PolicyChoice, Rates, Settings, Snapshot

WINDOW_US: Final = 5_000_000
_RECENT = 32


@dataclass(slots=True)
class Life:
    """One request, as far as it was seen. Times are on the executor's clock; 0: not yet."""

    id: int
    arrival_us: int
    seen_us: int
    prompt_tokens: int = 0
    generated_tokens: int = 0
    generated_at_first: int = 0
    max_new_tokens: int = 0
    tenant: int = 0
    endpoint: int = 0
    priority: int = 0
    features: int = 0
    ttft_deadline_us: int = 0
    deadline_us: int = 0
    hit_blocks: int = 0  # of the device, before it first ran
    ran: bool = False
    last_seen_us: int = 0
    first_token_us: int = 0
    ended_us: int = 0
    outcome: Outcome = Outcome.UNSPECIFIED

    @property
    def completed(self) -> bool:
        """Whether it came to its own end."""
        return self.outcome in (Outcome.STOP, Outcome.LENGTH)


@dataclass(frozen=True, slots=True)
class Window:
    """Service of the tenants that had a request waiting all the while, in tokens over weight."""

    service: tuple[float, ...]


@dataclass(slots=True)
class _OpenWindow:
    began_us: int
    backlogged: set[int]
    served: dict[int, float]


@dataclass(slots=True)
class Observed:
    """Fed with every snapshot and its decision, in order."""

    lives: dict[int, Life] = field(default_factory=dict)
    first_us: int = 0
    last_us: int = 0
    steps: int = 0
    preemptions: int = 0
    policies: list[PolicyChoice] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)
    pool_blocks: int = 0
    rates: Rates = field(default_factory=Rates)
    weights: dict[int, int] = field(default_factory=dict)
    max_rows: dict[int, int] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    samples: list[tuple[int, int, int]] = field(default_factory=list)  # rows, tokens, us until the next snapshot
    _open: _OpenWindow | None = None
    _between_us: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _step: tuple[int, int] = (0, 0)  # rows and tokens that the last decision let run

    def see(self, snapshot: Snapshot, decision: Decision) -> None:
        """One decision."""
        now_us = snapshot.now_us
        if not self.steps:
            # Where nothing ran yet, the first to arrive were seen from their arrival on.
            arrivals = snapshot.waiting.arrival_us if not snapshot.running.rows else snapshot.waiting.arrival_us[:0]
            self.first_us = min([now_us, *arrivals.tolist()])
        elif now_us > self.last_us:
            self._between_us.append(now_us - self.last_us)
            if self._step[0]:
                self.samples.append((*self._step, now_us - self.last_us))
        self.steps += 1
        self.settings, self.pool_blocks = snapshot.settings, snapshot.blocks.total
        if snapshot.rates.step_base_ns or snapshot.rates.step_per_token_ns:
            self.rates = snapshot.rates
        if not self.policies or self.policies[-1] != snapshot.policy:
            self.policies.append(snapshot.policy)
        self._see_waiting(snapshot.waiting, now_us)
        self._see_running(snapshot.running, now_us)
        self._see_candidates(snapshot)
        self._see_ended(snapshot)
        self._see_tenants(snapshot)
        self.preemptions += decision.preempt.rows
        self._step = (
            decision.run.rows + decision.admit.rows,
            int(decision.run.tokens.sum()) + int(decision.admit.tokens.sum()),
        )
        self.last_us = now_us

    def _see_running(self, table: RunningTable, now_us: int) -> None:
        generated = table.generated_tokens.tolist()
        for row, request in enumerate(table.id.tolist()):
            life = self.lives.get(request)
            if life is None or not life.ran:
                life = self._runs_first(table, row, now_us)
            life.last_seen_us = now_us
            if generated[row] > life.generated_tokens:
                life.generated_tokens = generated[row]
                life.first_token_us = life.first_token_us or now_us

    def _runs_first(self, table: RunningTable, row: int, now_us: int) -> Life:
        """A running row tells all about its request."""
        request = int(table.id[row])
        life = self.lives.get(request)
        if life is None:
            generated = int(table.generated_tokens[row])
            life = self.lives[request] = Life(request, now_us, now_us, generated_tokens=generated)
            life.generated_at_first = generated
        life.ran = True
        for name in _TOLD_BY_A_ROW:
            column = getattr(table, name)
            if len(column):
                setattr(life, name, int(column[row]))
        return life

    def _see_waiting(self, table: WaitingTable, now_us: int) -> None:
        if not table.rows:
            return
        for row, request in enumerate(table.id.tolist()):
            if request in self.lives:
                continue
            sent = {column.name: int(array[row]) for column, array in table.columns() if len(array)}
            generated = sent.get("generated_tokens", 0)
            life = Life(request, sent.get("arrival_us", now_us), now_us)
            life.prompt_tokens = sent.get("tokens", 0) - generated
            life.generated_tokens = life.generated_at_first = generated
            life.max_new_tokens = sent.get("new_tokens", 0) + generated
            for name in ("tenant", "endpoint", "priority", "features", "ttft_deadline_us", "deadline_us"):
                setattr(life, name, sent.get(name, 0))
            self.lives[request] = life

    def _see_candidates(self, snapshot: Snapshot) -> None:
        table = snapshot.candidates
        for request, blocks in zip(table.id.tolist(), table.device_hit_blocks.tolist(), strict=False):
            life = self.lives.get(request)
            if life is not None and not life.ran:
                life.hit_blocks = max(life.hit_blocks, blocks)

    def _see_ended(self, snapshot: Snapshot) -> None:
        table, now_us = snapshot.ended, snapshot.now_us
        for row, request in enumerate(table.id.tolist()):
            life = self.lives.get(request)
            if life is None:
                life = self.lives[request] = Life(request, now_us, now_us)
                life.tenant, life.prompt_tokens = int(table.tenant[row]), int(table.prompt_tokens[row])
            if life.ended_us:
                continue  # told again, because the snapshot that told it first was not answered
            # While nothing runs nobody is asked: what ended before is told late.
            late_us = 2 * int(median(self._between_us)) if self._between_us else 0
            life.ended_us = min(now_us, life.last_seen_us + late_us) if life.last_seen_us and late_us else now_us
            life.generated_tokens = int(table.generated_tokens[row])
            life.outcome = Outcome(int(table.outcome[row]))
            if life.generated_tokens and not life.first_token_us:
                life.first_token_us = life.ended_us

    def _see_tenants(self, snapshot: Snapshot) -> None:
        table, now_us = snapshot.tenants, snapshot.now_us
        weights = np.maximum(table.weight.astype(np.float64), 1.0) / 1000
        served = (table.served_prompt_tokens + table.served_generated_tokens) / weights
        numbers = table.tenant.tolist()
        self.weights |= zip(numbers, table.weight.tolist(), strict=True)
        self.max_rows |= zip(numbers, table.max_rows.tolist(), strict=False)
        waiting = set(np.unique(snapshot.waiting.tenant).tolist())
        if self._open is None:
            self._open = _OpenWindow(now_us, waiting, dict(zip(numbers, served.tolist(), strict=True)))
            return
        self._open.backlogged &= waiting
        if now_us - self._open.began_us < WINDOW_US:
            return
        now = dict(zip(numbers, served.tolist(), strict=True))
        there = [t for t in sorted(self._open.backlogged) if t in now and t in self._open.served]
        if len(there) > 1:
            self.windows.append(Window(tuple(now[t] - self._open.served[t] for t in there)))
        self._open = _OpenWindow(now_us, waiting, now)


_TOLD_BY_A_ROW = (
    "arrival_us",
    "priority",
    "tenant",
    "endpoint",
    "prompt_tokens",
    "max_new_tokens",
    "ttft_deadline_us",
    "deadline_us",
    "features",
)
