"""How many rows each tenant may have, and who waits for nothing but that.

A tenant at its quota holds up nobody: its requests are left out of the line, and stand in it again when one of its
rows ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jitney.columns import I64
from jitney.snapshot import Snapshot
from scheduler_svc.lookups import tenant_rows
from scheduler_svc.ordering import first_waiting
from scheduler_svc.policies.base import Ranking
from scheduler_svc.running import Flags


@dataclass(frozen=True, slots=True)
class Quotas:
    """`rooms` [T + 1]: rows that each tenant may still get, the last for tenants without a quota; `tenant` [W]: the row
    of each waiting request's tenant in that."""

    rooms: I64
    tenant: I64

    @classmethod
    def of(cls, snapshot: Snapshot) -> Quotas | None:
        """None if no tenant has a quota of rows."""
        table = snapshot.tenants
        if not np.count_nonzero(table.max_rows):
            return None
        running = tenant_rows(table.tenant, snapshot.running.tenant)
        has = np.bincount(running, minlength=table.rows + 1)[: table.rows]
        rooms = np.where(table.max_rows > 0, np.maximum(table.max_rows - has, 0), snapshot.waiting.rows)
        rooms = np.append(rooms, snapshot.waiting.rows)
        return cls(rooms, tenant_rows(table.tenant, snapshot.waiting.tenant))

    def held_back(self, among: Flags | None) -> int:
        """How many of the waiting requests that are not refused cannot board for their tenant's quota."""
        tenant = self.tenant if among is None else self.tenant[among]
        return int(np.maximum(np.bincount(tenant, minlength=len(self.rooms)) - self.rooms, 0).sum())

    def within(self, order: I64) -> Flags:
        """Which of the waiting rows in `order` are within their tenant's quota, if all before them board."""
        tenant = self.tenant[order]
        by_tenant = np.argsort(tenant, kind="stable")
        sorted_ = tenant[by_tenant]
        first = np.arange(len(order))
        first[1:][sorted_[1:] == sorted_[:-1]] = 0
        turn = np.empty(len(order), np.int64)
        turn[by_tenant] = np.arange(len(order)) - np.maximum.accumulate(first)
        fits: Flags = turn < self.rooms[tenant]
        return fits


def line(snapshot: Snapshot, ranking: Ranking, count: int, among: Flags | None, quotas: Quotas | None) -> I64:
    """The first `count` waiting rows that may board as far as quotas go, of those in `among` [W] (None: of all)."""
    if quotas is None:
        return first_waiting(snapshot, ranking, count, among)
    opens = quotas.rooms[quotas.tenant] > 0
    opens = opens if among is None else opens & among
    while True:
        order = first_waiting(snapshot, ranking, count, opens)
        fits = quotas.within(order)
        if fits.all():
            return order
        full = np.unique(quotas.tenant[order[~fits]])
        opens &= ~np.isin(quotas.tenant, full)
        opens[order[fits]] = True
