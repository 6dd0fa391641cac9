"""Fair shares between tenants, by virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: each tenant has a counter of the
service that it was given, over its weight; the next request is one of the tenant with the smallest; a tenant that comes
back from idle is lifted to the smallest counter among those that wait, so that nobody saves up service. Between two
tenants that both wait all the time, services differ by at most 2 * max(prompt cost * longest prompt, output cost *
tokens that fit the pool), weights 1.

Three things differ. Prompts are charged as they are computed, not when they board: what a tenant's rows still have to
compute counts as served when requests are ordered. So does, within one order, each request that stands before it,
which makes the order that of all (counter + cost of the tenant's own requests ahead). And a counter is what the
executor says was done plus a lift, which is all that is remembered here.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from jitney.columns import I64, RunningTable, WaitingTable
from jitney.snapshot import Snapshot
from scheduler_svc.counters import WAITED, Counters, Kept
from scheduler_svc.lookups import tenant_rows
from scheduler_svc.policies.base import Parameter, Policy, Ranking

SCALE: Final = 1000
"""Counters are in costs of a tenant of weight 1; weights come in thousandths."""


class Fair(Policy):
    """The tenant that was served least goes first, over its weight; one tenant's requests by arrival."""

    name: ClassVar[str] = "fair"
    summary: ClassVar[str] = "Virtual token counters per tenant, weighted; no tenant saves up service while idle."
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("prompt_cost", "Cost of a prompt token that is computed", 0, 1000, 1),
        Parameter("cached_cost", "Cost of a prompt token that the cache had", 0, 1000, 0),
        Parameter("output_cost", "Cost of a generated token", 0, 1000, 2),
    )
    waiting_columns: ClassVar[tuple[str, ...]] = ("arrival_us",)
    tables: ClassVar[tuple[str, ...]] = ("tenants",)

    def rank(self, snapshot: Snapshot, memory: bytes) -> Ranking:
        """By (virtual counter of the tenant at its turn, arrival)."""
        run, wait = snapshot.running, snapshot.waiting
        rows = tenant_rows(snapshot.tenants.tenant, wait.tenant)
        counters = self._counters(snapshot, memory, rows)
        weight = np.append(counters.weight, SCALE)
        at = np.append(counters.value, counters.level)
        runs = tenant_rows(snapshot.tenants.tenant, run.tenant)
        planned = at.copy()
        np.add.at(planned, runs, self._to_come(snapshot) * SCALE // weight[runs])
        cost = wait.tokens.astype(np.int64) * self.value("prompt_cost") * SCALE // weight[rows]
        tags = planned[rows] + _own_before(rows, cost, wait.arrival_us)
        return Ranking((at[runs], run.arrival_us), (tags, wait.arrival_us), memory=counters.remembered())

    def says(self, snapshot: Snapshot, table: RunningTable | WaitingTable, row: int, ranking: Ranking) -> str:
        """The counter that it stands at."""
        keys = ranking.waiting if table is snapshot.waiting else ranking.running
        turn = f"tenant {int(table.tenant[row])} will have been served {int(keys[0][row])} by its turn, "
        return turn + super().says(snapshot, table, row, ranking)

    def _counters(self, snapshot: Snapshot, memory: bytes, rows: I64) -> Counters:
        """Of each tenant of the table [T]; `rows` are those of the waiting requests."""
        table = snapshot.tenants
        weight = np.minimum(np.maximum(table.weight, 1), WAITED - 1).astype(np.int64)
        cost = (
            table.served_prompt_tokens * self.value("prompt_cost")
            + table.served_cached_tokens * self.value("cached_cost")
            + table.served_generated_tokens * self.value("output_cost")
        )
        waits = np.bincount(rows, minlength=table.rows + 1)[: table.rows] > 0
        served = cost * SCALE // weight
        if not memory:
            return Counters(table.tenant, weight, served, np.zeros(table.rows, np.int64), waits, 0, Kept.read(b""))
        kept = Kept.read(memory)
        places = tenant_rows(kept.tenant, table.tenant)
        known = places < len(kept.tenant)
        entry = np.append(kept.weight, np.uint32(SCALE))[places]
        was = np.maximum(entry & (WAITED - 1), 1).astype(np.int64)
        before = served if bool((was == weight).all()) else cost * SCALE // was
        value = np.where(known, before + np.append(kept.lift, 0)[places], np.iinfo(np.int64).min)
        stayed = waits & known & (entry >= WAITED)
        floor = int(value[stayed].min()) if stayed.any() else kept.level
        value = np.where(stayed | (known & ~waits), value, np.maximum(value, floor))
        now = value[waits] if waits.any() else value
        level = max(kept.level, int(now.min())) if len(now) else kept.level
        left = np.ones(len(kept.tenant), np.bool_)
        left[places[known]] = False
        return Counters(table.tenant, weight, served, value, waits, level, kept.take(left & (kept.counter > level)))

    def _to_come(self, snapshot: Snapshot) -> I64:
        """Cost of what running rows [R] have in flight or still to compute of their prompts: not charged yet."""
        run = snapshot.running
        prompt = np.maximum(run.prompt_tokens.astype(np.int64) - run.computed_tokens, 0)
        decodes = (run.in_flight_tokens > 0) & (run.computed_tokens + run.in_flight_tokens >= run.prompt_tokens)
        cost: I64 = prompt * self.value("prompt_cost") + decodes * self.value("output_cost")
        return cost


def _own_before(rows: I64, cost: I64, arrival_us: I64) -> I64:
    """Cost [W] of the requests of the same tenant that stand before each."""
    if bool((arrival_us[1:] >= arrival_us[:-1]).all()):
        small = len(rows) and int(rows.max()) < 1 << 16
        order = np.argsort(rows.astype(np.uint16) if small else rows, kind="stable")  # 16 bits: by radix
    else:
        order = np.lexsort((arrival_us, rows))
    sums = np.cumsum(cost[order]) - cost[order]
    tenant, places = rows[order], np.arange(len(rows))
    places[1:][tenant[1:] == tenant[:-1]] = 0
    first = np.maximum.accumulate(places)
    before = np.empty(len(rows), np.int64)
    before[order] = sums - sums[first]
    return before
