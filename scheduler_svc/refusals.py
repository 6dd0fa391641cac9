"""Waiting requests that are refused, each with the limit, the value and when to try again.

The executor refuses at its door what it can; what remains is a prompt that does not fit the pool, work that the policy
calls hopeless, and what a tenant has waiting beyond its quota (the newest first, never what has run already).
"""

from __future__ import annotations

import numpy as np

from jitney.columns import I64
from jitney.decision import Refusal, RefusalReason
from jitney.snapshot import Snapshot
from scheduler_svc.costs import ASSUMED_PREFILL_TOKENS_PER_S
from scheduler_svc.lookups import rows_with, tenant_rows
from scheduler_svc.running import Flags


def refuse(snapshot: Snapshot, by_policy: tuple[Refusal, ...]) -> tuple[tuple[Refusal, ...], Flags | None]:
    """All refusals, one a request, and which waiting requests [W] are left; None: all."""
    wait = snapshot.waiting
    if wait.rows == 0:
        return (), None
    stays = np.ones(wait.rows, np.bool_)
    found = _never_fits(snapshot, stays)
    if by_policy:
        rows = rows_with(wait.id, np.array([refusal.id for refusal in by_policy], np.uint64))
        for row, refusal in zip(rows.tolist(), by_policy, strict=True):
            if row >= 0 and stays[row]:
                stays[row] = False
                found.append(refusal)
    if np.count_nonzero(snapshot.tenants.max_waiting_tokens):
        found += _over_quota(snapshot, stays)
    return tuple(found), stays if found else None


def _never_fits(snapshot: Snapshot, stays: Flags) -> list[Refusal]:
    """Those that need more blocks than the pool has; a pool of no blocks is one that is not known yet."""
    wait, total, size = snapshot.waiting, snapshot.blocks.total, snapshot.settings.block_tokens
    if total == 0 or int(wait.tokens.max()) <= total * size:
        return []
    lost = wait.tokens > total * size
    stays &= ~lost
    rows = zip(wait.id[lost].tolist(), wait.tokens[lost].tolist(), strict=True)
    return [Refusal(id_, RefusalReason.NEVER_FITS, limit=total, value=-(-tokens // size)) for id_, tokens in rows]


def _over_quota(snapshot: Snapshot, stays: Flags) -> list[Refusal]:
    wait, tenants = snapshot.waiting, snapshot.tenants
    new = stays & (wait.preemptions == 0)
    new[snapshot.waiting_policy.policy_row] = False
    limits = np.append(tenants.max_waiting_tokens, 0)
    tenant = tenant_rows(tenants.tenant, wait.tenant)
    rows = np.flatnonzero(new & (limits[tenant] > 0))
    rows = rows[np.lexsort((wait.id[rows], tenant[rows]))]
    total: I64 = np.cumsum(wait.tokens[rows], dtype=np.int64)
    starts = np.flatnonzero(np.diff(tenant[rows], prepend=-1))
    before = np.zeros(len(rows), np.int64)
    before[starts] = total[starts] - wait.tokens[rows[starts]]
    total -= np.maximum.accumulate(before)
    over = total > limits[tenant[rows]]
    speed = snapshot.rates.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S
    out = []
    for row, tokens in zip(rows[over].tolist(), total[over].tolist(), strict=True):
        limit = int(limits[tenant[row]])
        wait_us = (tokens - limit) * 1_000_000 // speed
        out.append(Refusal(int(wait.id[row]), RefusalReason.QUOTA, limit, tokens, retry_after_us=max(wait_us, 1)))
        stays[row] = False
    return out
