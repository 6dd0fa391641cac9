"""An executor reduced to counting, one launched step in flight: shows snapshots, applies decisions, holds them to
their invariants. Requests share nothing. With a modelled CPU tier there is room to swap, over one copy queue."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jitney.columns import (
    CandidateTable,
    EndingTable,
    RunningTable,
    TenantTable,
    WaitingPolicyTable,
    WaitingTable,
)
from jitney.decision import Decision, PreemptionMode, RefusalReason
from jitney.snapshot import Blocks, PolicyChoice, PolicyMemory, Rates, Settings, Snapshot, TierRoom
from jitney.snapshot_checks import check
from tests.support.decision_checks import check_decision
from tests.support.situations import rows_of


@dataclass
class Toy:
    """One request. `output` is how much it will really generate, `max_new` what the scheduler knows of it."""

    id: int
    arrival_us: int
    prompt: int
    output: int
    max_new: int
    priority: int = 0
    tenant: int = 0
    ttft_deadline_us: int = 0
    deadline_us: int = 0
    predicted: int = -1
    policy_a: int = 0
    policy_b: int = 0
    generated: int = 0
    computed: int = 0
    in_flight: int = 0
    held: int = 0
    lower: int = 0  # blocks that lie in the CPU tier
    loaded_us: int = 0  # when they are back
    preemptions: int = 0
    admitted_us: int = 0
    first_token_step: int = -1
    ended_step: int = -1
    token_steps: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        return self.prompt + self.generated

    def columns(self) -> dict[str, int]:
        return {
            "id": self.id,
            "arrival_us": self.arrival_us,
            "prompt_tokens": self.prompt,
            "generated_tokens": self.generated,
            "max_new_tokens": self.max_new,
            "computed_tokens": self.computed,
            "in_flight_tokens": self.in_flight,
            "held_blocks": self.held,
            "loading": int(self.lower > 0),
            "preemptions": self.preemptions,
            "admitted_us": self.admitted_us,
            "priority": self.priority,
            "tenant": self.tenant,
            "ttft_deadline_us": self.ttft_deadline_us,
            "deadline_us": self.deadline_us,
            "predicted_p50": self.predicted,
            "predicted_p90": self.predicted,
            "policy_a": self.policy_a,
            "policy_b": self.policy_b,
        }

    def waiting_columns(self) -> dict[str, int]:
        own = {"id": self.id, "tokens": self.known, "new_tokens": self.max_new - self.generated}
        return {**self.columns(), **own}


class ToyExecutor:
    """Runs until all have ended or been refused."""

    def __init__(
        self,
        requests: list[Toy],
        settings: Settings,
        pool: int,
        grant: int = 4,
        policy: PolicyChoice | None = None,
        rates: Rates | None = None,
        weights: dict[int, int] | None = None,
        step_us: int = 1000,
        cpu_blocks: int = 0,
        copy_us: int = 0,
    ) -> None:
        """`copy_us` a block, either way, one after the other."""
        self.step_us, self.cpu_blocks, self.copy_us = step_us, cpu_blocks, copy_us
        self.copies_end_us = 0
        self.moving: list[tuple[int, int]] = []  # (when they have left, blocks) of swap victims
        self.swaps = 0
        self.arriving = sorted(requests, key=lambda r: (r.arrival_us, r.id))
        self.settings, self.pool, self.grant = settings, pool, grant
        self.policy, self.memory = policy or PolicyChoice(), PolicyMemory()
        self.rates = rates or Rates(prefill_tokens_per_s=10_000)
        self.weights = weights or {}
        self.served: dict[int, list[int]] = {}  # by tenant: prompt and generated tokens
        self.waiting: list[Toy] = []
        self.running: list[Toy] = []
        self.leaving: list[Toy] = []  # ended, their blocks released with the next batch
        self.refused: list[int] = []
        self.ended: list[Toy] = []
        self.step = 0
        self.prefilled = 0
        self.preemptions = 0
        self.rows_run = 0
        self.max_running = 0

    @property
    def held(self) -> int:
        return sum(r.held for r in [*self.running, *self.leaving]) + sum(blocks for _, blocks in self.moving)

    @property
    def cpu(self) -> TierRoom:
        """What is left of the CPU tier."""
        left = self.cpu_blocks - sum(r.lower for r in [*self.waiting, *self.running])
        return TierRoom(left, left, max(self.copies_end_us - self.step * self.step_us, 0))

    @property
    def busy(self) -> bool:
        return bool(self.arriving or self.waiting or self.running)

    def snapshot(self) -> Snapshot:
        now_us = self.step * self.step_us
        while self.arriving and self.arriving[0].arrival_us <= now_us:
            self.waiting.append(self.arriving.pop(0))
        self.waiting.sort(key=lambda r: r.id)
        self.moving = [each for each in self.moving if each[0] > now_us]
        for r in self.running:
            if r.lower and r.loaded_us <= now_us:
                r.computed, r.lower = r.lower * self.settings.block_tokens, 0
        ending = [r for r in self.running if self._last_in_flight(r)]
        rows = [r for r in self.running if not self._last_in_flight(r)]
        free = self.pool - self.held
        granted = min(free, self.grant)
        size = len(rows)
        columns = {c: np.array([r.columns()[c] for r in rows]) for c in (rows[0].columns() if rows else {})}
        blank = RunningTable()
        typed = {
            column.name: (columns.get(column.name, np.zeros(size)) if size else np.zeros(0)).astype(column.dtype)
            for column, _ in blank.columns()
        }
        return Snapshot(
            executor="toy",
            incarnation=7,
            step=self.step,
            now_us=now_us,
            settings=self.settings,
            blocks=Blocks(self.pool, free - granted, 0, sum(blocks for _, blocks in self.moving), granted),
            cpu=self.cpu,
            policy=self.policy,
            memory=self.memory,
            rates=self.rates,
            running=RunningTable(**typed),
            ending=EndingTable(
                id=np.array([r.id for r in ending], np.uint64),
                held_blocks=np.array([r.held for r in ending], np.int32),
            ),
            waiting=rows_of(WaitingTable, [r.waiting_columns() for r in self.waiting]),
            waiting_policy=rows_of(
                WaitingPolicyTable,
                [
                    {"policy_row": n, "policy_a": r.policy_a, "policy_b": r.policy_b}
                    for n, r in enumerate(self.waiting)
                    if r.preemptions
                ],
            ),
            tenants=self._tenants(),
            candidates=CandidateTable(),
        )

    def _tenants(self) -> TenantTable:
        live = sorted({r.tenant for r in [*self.waiting, *self.running]})
        rows = []
        for tenant in live:
            prompt, generated = self.served.setdefault(tenant, [0, 0])
            row = {"tenant": tenant, "weight": self.weights.get(tenant, 1000)}
            rows.append(row | {"served_prompt_tokens": prompt, "served_generated_tokens": generated})
        table: TenantTable = rows_of(TenantTable, rows)
        return table

    def turn(self, decide: object) -> Decision:
        """Snapshot and decision while a step is in flight; then that step ends, and the decided one is launched."""
        snapshot = self.snapshot()
        check(snapshot)
        decision: Decision = decide(snapshot)  # type: ignore[operator]
        check_decision(snapshot, decision)
        self._land()
        self._apply(decision)
        self.step += 1
        return decision

    def _last_in_flight(self, r: Toy) -> bool:
        return bool(r.in_flight) and r.computed + r.in_flight == r.known and r.generated + 1 >= r.max_new

    def _land(self) -> None:
        self.leaving.clear()
        for r in list(self.running):
            if not r.in_flight:
                continue
            served = self.served.setdefault(r.tenant, [0, 0])
            served[0] += max(min(r.in_flight, r.prompt - r.computed), 0)
            r.computed += r.in_flight
            r.in_flight = 0
            if r.computed < r.known:
                continue
            r.generated += 1
            served[1] += 1
            r.token_steps.append(self.step)
            r.first_token_step = self.step if r.first_token_step < 0 else r.first_token_step
            if r.generated >= min(r.output, r.max_new):
                r.ended_step = self.step
                self.running.remove(r)
                self.ended.append(r)
                self.leaving.append(r)

    def _apply(self, decision: Decision) -> None:
        by_id = {r.id: r for r in self.running}
        waiting = {r.id: r for r in self.waiting}
        self.memory = decision.memory
        for id_, a, b in zip(*(c.tolist() for _, c in decision.policy_updates.columns()), strict=True):
            if id_ in by_id:
                by_id[id_].policy_a, by_id[id_].policy_b = a, b
        for refusal in decision.refusals:
            assert refusal.reason in (RefusalReason.NEVER_FITS, RefusalReason.DEADLINE)
            self.waiting.remove(waiting[refusal.id])
            self.refused.append(refusal.id)
        for id_, mode in zip(decision.preempt.id.tolist(), decision.preempt.mode.tolist(), strict=True):
            r = by_id.pop(id_, None)
            if r is None:  # it ended in the step that was in flight, and is released with this batch too
                self.leaving = [gone for gone in self.leaving if gone.id != id_]
                continue
            self.running.remove(r)
            if mode != PreemptionMode.RECOMPUTE:
                assert mode == PreemptionMode.SWAP_CPU and self.copy_us
                r.lower = r.computed // self.settings.block_tokens
                self.moving.append((self._copied(r.lower), r.lower))  # its last block is free at once
                assert self.cpu.pin_blocks >= 0
                self.swaps += 1
            r.held = r.computed = 0
            r.preemptions += 1
            self.preemptions += 1
            self.waiting.append(r)
        # Ended rows release with this batch: what the decision counted on was there without them.
        admit = decision.admit
        for id_, tokens, blocks in zip(admit.id.tolist(), admit.tokens.tolist(), admit.blocks.tolist(), strict=True):
            r = waiting[id_]
            self.waiting.remove(r)
            r.held, r.admitted_us = blocks, self.step * self.step_us
            assert r.held * self.settings.block_tokens >= r.known
            self.running.append(r)
            if r.lower:
                r.loaded_us = self._copied(r.lower)
            else:
                self._launch(r, tokens or self.settings.chunk_cap_tokens)  # 0: there is nothing to load after all
        for id_, tokens in zip(*(c.tolist() for _, c in decision.run.columns()), strict=True):
            if id_ in by_id:
                self._launch(by_id[id_], tokens)
        assert self.held <= self.pool, "blocks were given twice"
        self.max_running = max(self.max_running, len(self.running))
        self.rows_run += sum(1 for r in self.running if r.in_flight)

    def _copied(self, blocks: int) -> int:
        """When so many blocks have gone through the copy queue."""
        self.copies_end_us = max(self.copies_end_us, self.step * self.step_us) + blocks * self.copy_us
        return self.copies_end_us

    def _launch(self, r: Toy, tokens: int) -> None:
        tokens = min(tokens, r.known - r.computed)
        assert tokens > 0
        grown = -(-(r.computed + tokens) // self.settings.block_tokens) - r.held
        r.held += max(grown, 0)
        r.in_flight = tokens
        self.prefilled += tokens if tokens > 1 else 0
