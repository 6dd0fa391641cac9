"""Tenants' quotas of rows and of waiting tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from jitney.columns import TenantTable
from jitney.decision import Decision, RefusalReason, WaitReason
from jitney.snapshot import Blocks, PolicyChoice, Rates, Settings, Snapshot
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.quotas import Quotas, line
from tests.support.decision_checks import check_decision
from tests.support.situations import random_snapshot, rows_of, running, waiting


def tenants(*rows: dict[str, int]) -> TenantTable:
    table: TenantTable = rows_of(TenantTable, list(rows))
    return table


def snapshot(**fields: Any) -> Snapshot:
    base = {"settings": Settings(max_rows=6, max_step_tokens=2000), "blocks": Blocks(500, 500)}
    return Snapshot(**{**base, **fields})


def decided(**fields: Any) -> Decision:
    shown = snapshot(**fields)
    decision = decide(shown)
    check_decision(shown, decision)
    return decision


def test_a_tenant_at_its_quota_holds_up_nobody() -> None:
    table = tenants({"tenant": 1, "max_rows": 2}, {"tenant": 2})
    rows = running({"tenant": 1}, {"tenant": 2})
    crowd = waiting(*({"tenant": 1} for _ in range(200)), {"tenant": 2}, {"tenant": 3})
    decision = decided(tenants=table, running=rows, waiting=crowd)
    assert decision.admit.id.tolist() == [101, 301, 302]
    assert decision.waiting_reasons == ((WaitReason.QUOTA, 199),)
    assert decision.next_candidates.tolist() == []
    told = explain(snapshot(tenants=table, running=rows, waiting=crowd), 150)
    assert told.reason is WaitReason.QUOTA and told.sentence.startswith("tenant 1 may have 2 rows, ")


def test_who_waits_for_a_row_is_told_from_who_waits_for_the_quota() -> None:
    table = tenants({"tenant": 1, "max_rows": 1})
    line_ = waiting({"tenant": 2}, {"tenant": 1}, {"tenant": 1}, {"tenant": 2})
    decision = decided(settings=Settings(max_rows=1), tenants=table, waiting=line_)
    assert decision.admit.id.tolist() == [101]
    assert decision.waiting_reasons == ((WaitReason.ROWS, 2), (WaitReason.QUOTA, 1))


def test_the_line_is_that_of_one_after_the_other() -> None:
    """Against a loop over the whole order, for every policy."""
    rand = random.Random(6)
    for seed in range(150):
        shown = random_snapshot(random.Random(seed), rand.randint(0, 5), rand.randint(0, 20))
        quotas = Quotas.of(shown)
        ranking = BUILT_IN.choose(shown.policy).rank(shown, b"")
        limits = dict(zip(shown.tenants.tenant.tolist(), shown.tenants.max_rows.tolist(), strict=True))
        has: dict[int, int] = {}
        for tenant in shown.running.tenant.tolist():
            has[tenant] = has.get(tenant, 0) + 1
        expected = []
        for row in line(shown, ranking, 99, None, None).tolist():
            tenant = int(shown.waiting.tenant[row])
            if not limits.get(tenant) or has.get(tenant, 0) < limits[tenant]:
                has[tenant] = has.get(tenant, 0) + 1
                expected.append(row)
        for count in (1, 4, 99):
            assert line(shown, ranking, count, None, quotas).tolist() == expected[:count]
        assert (quotas.held_back(None) if quotas else 0) == shown.waiting.rows - len(expected)


def test_what_waits_beyond_a_quota_is_refused_newest_first_with_a_hint() -> None:
    table = tenants({"tenant": 1, "max_waiting_tokens": 100}, {"tenant": 2})
    rows = [{"tenant": 1, "tokens": 60}, {"tenant": 2, "tokens": 900}, {"tenant": 1, "tokens": 40}]
    crowd = waiting(*rows, {"tenant": 1, "tokens": 10}, {"tenant": 1, "tokens": 500, "preemptions": 1})
    fields = {"tenants": table, "waiting": crowd, "rates": Rates(prefill_tokens_per_s=1_000)}
    refusal = decided(**fields).refusals[0]
    assert len(decided(**fields).refusals) == 1
    assert (refusal.id, refusal.reason, refusal.limit, refusal.value) == (104, RefusalReason.QUOTA, 100, 110)
    assert refusal.retry_after_us == 10_000
    said = explain(snapshot(**fields), 104).sentence
    assert said == "its tenant has 110 tokens waiting, allowed are 100: it is refused, try again in 10000 us"


def test_quotas_hold_under_every_policy() -> None:
    for kind in BUILT_IN.kinds:
        table = tenants({"tenant": 1, "max_rows": 3, "weight": 1000}, {"tenant": 2, "weight": 1000})
        crowd = waiting(*({"tenant": 1 + (n > 9), "priority": 9 - n} for n in range(12)))
        decision = decided(policy=PolicyChoice(kind.name), tenants=table, running=running({"tenant": 1}), waiting=crowd)
        owner = crowd.tenant[np.isin(crowd.id, decision.admit.id)]
        assert np.count_nonzero(owner == 1) == 2 and np.count_nonzero(owner == 2) == 2
        assert dict(decision.waiting_reasons)[WaitReason.QUOTA] == 8
