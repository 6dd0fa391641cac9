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

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64, U32, RunningTable, WaitingTable
from jitney.snapshot import Snapshot
from scheduler_svc.lookups import tenant_rows
from scheduler_svc.policies.base import Parameter, Policy, Ranking

SCALE: Final = 1000
"""Counters are in costs of a tenant of weight 1; weights come in thousandths."""
MAX_TENANTS: Final = 2000
"""Are remembered: those with the largest counters, since the others would be lifted anyway."""
_ENTRY: Final = np.dtype([("tenant", "<u4"), ("weight", "<u4"), ("lift", "<i8"), ("counter", "<i8")])
_WAITED: Final = np.uint32(1 << 31)  # beside the weight: whether it had a request waiting


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
        return Ranking((at[runs], run.arrival_us), (tags, wait.arrival_us), memory=counters.remembered(snapshot))

    def says(self, snapshot: Snapshot, table: RunningTable | WaitingTable, row: int, ranking: Ranking) -> str:
        """The counter that it stands at."""
        keys = ranking.waiting if table is snapshot.waiting else ranking.running
        turn = f"tenant {int(table.tenant[row])} will have been served {int(keys[0][row])} by its turn, "
        return turn + super().says(snapshot, table, row, ranking)

    def _counters(self, snapshot: Snapshot, memory: bytes, rows: I64) -> Counters:
        """Of each tenant of the table [T]; `rows` are those of the waiting requests."""
        table = snapshot.tenants
        weight = np.clip(table.weight, 1, _WAITED - 1).astype(np.int64)
        cost = (
            table.served_prompt_tokens * self.value("prompt_cost")
            + table.served_cached_tokens * self.value("cached_cost")
            + table.served_generated_tokens * self.value("output_cost")
        )
        waits = np.bincount(rows, minlength=table.rows + 1)[: table.rows] > 0
        served = cost * SCALE // weight
        if not memory:
            return Counters(table.tenant, weight, served, np.zeros(table.rows, np.int64), waits, 0, np.empty(0, _ENTRY))
        level, kept = int(np.frombuffer(memory, "<i8", 1)[0]), np.frombuffer(memory, _ENTRY, offset=8)
        places = tenant_rows(kept["tenant"], table.tenant)
        known = places < len(kept)
        entry = kept[np.minimum(places, len(kept) - 1)] if len(kept) else np.zeros(table.rows, _ENTRY)
        was = np.maximum(entry["weight"] & (_WAITED - 1), 1).astype(np.int64)
        value = np.where(known, cost * SCALE // was + entry["lift"], np.iinfo(np.int64).min)
        stayed = waits & known & ((entry["weight"] & _WAITED) != 0)
        floor = int(value[stayed].min()) if stayed.any() else level
        value = np.where(stayed | (known & ~waits), value, np.maximum(value, floor))
        now = value[waits] if waits.any() else value
        level = max(level, int(now.min())) if len(now) else level
        gone = kept[~np.isin(kept["tenant"], table.tenant) & (kept["counter"] > level)]
        gone["weight"] &= _WAITED - 1
        return Counters(table.tenant, weight, served, value, waits, level, gone)

    def _to_come(self, snapshot: Snapshot) -> I64:
        """Cost of what running rows [R] have in flight or still to compute of their prompts: not charged yet."""
        run = snapshot.running
        prompt = np.maximum(run.prompt_tokens.astype(np.int64) - run.computed_tokens, 0)
        decodes = (run.in_flight_tokens > 0) & (run.computed_tokens + run.in_flight_tokens >= run.prompt_tokens)
        cost: I64 = prompt * self.value("prompt_cost") + decodes * self.value("output_cost")
        return cost


@dataclass(frozen=True, slots=True)
class Counters:
    """[T] each. `gone`: entries of tenants that have no request now, but were served more than those that wait."""

    tenant: U32
    weight: I64
    served: I64  # over the weight
    value: I64  # the counter: served and lift
    waits: NDArray[np.bool_]
    level: int  # the smallest counter of those that wait, or last did
    gone: NDArray[np.void]

    def remembered(self, snapshot: Snapshot) -> bytes:
        """For the next decision."""
        entries = np.empty(len(self.tenant), _ENTRY)
        entries["tenant"], entries["counter"], entries["lift"] = self.tenant, self.value, self.value - self.served
        entries["weight"] = self.weight.astype(np.uint32) | np.where(self.waits, _WAITED, np.uint32(0))
        entries = np.concatenate((entries, self.gone))
        if len(entries) > MAX_TENANTS:
            entries = entries[np.lexsort((entries["tenant"], -entries["counter"]))[:MAX_TENANTS]]
        return np.int64(self.level).tobytes() + entries.tobytes()


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
