"""Snapshots for tests: by hand in a line or two, and at random for Hypothesis."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from jitney.columns import (
    HISTOGRAM_BUCKETS,
    CandidateTable,
    EndedTable,
    EndingTable,
    HistogramTable,
    RunningTable,
    Table,
    TenantTable,
    WaitingPolicyTable,
    WaitingTable,
    columns_of,
)
from jitney.snapshot import (
    Batching,
    Blocks,
    HorizonKind,
    LowerTiers,
    Outcome,
    PolicyChoice,
    PolicyMemory,
    Rates,
    Settings,
    Snapshot,
    TierRoom,
)
from scheduler_svc.policies import BUILT_IN


def rows_of(kind: type[Table], rows: list[dict[str, int]], **defaults: int) -> Any:
    """A table out of one dict a row; what a row does not say is its default, or unknown, or 0."""
    columns: dict[str, Any] = {}
    for column in columns_of(kind):
        missing = defaults.get(column.name, column.unknown or 0)
        columns[column.name] = np.array([row.get(column.name, missing) for row in rows], column.dtype)
    return kind(**columns)


def running(*rows: dict[str, int]) -> RunningTable:
    """Running rows; a row of `prompt` tokens decodes unless it says otherwise."""
    full = []
    for number, row in enumerate(rows, 1):
        prompt = row.get("prompt_tokens", 16)
        base = {"id": number, "prompt_tokens": prompt, "computed_tokens": prompt, "generated_tokens": 1}
        full.append(base | {"max_new_tokens": 100, "held_blocks": -(-prompt // 16)} | row)
    table: RunningTable = rows_of(RunningTable, full)
    return table


def waiting(*rows: dict[str, int]) -> WaitingTable:
    """Waiting requests, ids from 101 on."""
    table: WaitingTable = rows_of(
        WaitingTable,
        [{"id": 101 + n, "arrival_us": n, "tokens": 16, "new_tokens": 10} | row for n, row in enumerate(rows)],
    )
    return table


def candidates(*rows: dict[str, int]) -> CandidateTable:
    """Looked-up requests."""
    table: CandidateTable = rows_of(CandidateTable, list(rows))
    return table


def ending(*rows: dict[str, int]) -> EndingTable:
    """Rows whose last token is in flight."""
    table: EndingTable = rows_of(EndingTable, list(rows))
    return table


@st.composite
def snapshots(draw: st.DrawFn, *, tiers: bool = False) -> Snapshot:
    """Possible snapshots, small and full of corners. With `tiers` there may be room to swap.

    Hypothesis draws the sizes, which is what shrinks well; the numbers in the rows come from a seed, which is fast.
    """
    rand = random.Random(draw(st.integers(0, 2**32)))
    n_run, n_wait = draw(st.integers(0, 8)), draw(st.integers(0, 12))
    return random_snapshot(rand, n_run, n_wait, tiers=tiers)


def random_snapshot(rand: random.Random, n_run: int, n_wait: int, *, tiers: bool = False, policy: str = "") -> Snapshot:
    """A possible snapshot with so many rows, under `policy` or any."""
    size, total = rand.choice([1, 4, 16]), rand.randint(1, 60)
    ids = rand.sample(range(1, n_run + n_wait + 20), n_run + n_wait + 2)
    run_ids, wait_ids, end_ids = ids[:n_run], ids[n_run:-2], ids[-2:]
    lines = [_waiting_row(rand, id_, total * size) for id_ in wait_ids]
    crowded = rand.random() < 0.4
    free = rand.randint(0, 2 if crowded and total > 1 else total)
    evictable = 0 if crowded else rand.randint(0, total - free)
    looked = [line for line in lines if rand.random() < 0.5][:64]

    def room() -> TierRoom:
        return TierRoom(*(rand.randint(0, 20) for _ in range(3))) if tiers else TierRoom()

    return Snapshot(
        executor="e",
        incarnation=3,
        step=rand.getrandbits(64),
        attempt=rand.randint(0, 3),
        now_us=rand.getrandbits(rand.choice([26, 40])),
        settings=Settings(
            max_step_tokens=rand.randint(1, 64),
            max_rows=max(n_run, 1) if crowded else rand.randint(1, 12),
            block_tokens=size,
            chunk_cap_tokens=rand.randint(1, 40),
            block_reserve=rand.randint(0, 5),
            max_preemptions=3 if crowded else rand.randint(0, 2),
            batching=rand.choice([Batching.CONTINUOUS] * 6 + [Batching.STATIC_PADDED, Batching.STATIC_DROPPING]),
            horizon_kind=rand.choice([HorizonKind.STEPS] * 5 + [HorizonKind.UNTIL_EVENT]),
            horizon_steps=rand.choice([1, 1, 1, 2, 7, 100]),
            target_tpot_us=rand.choice([0, 0, 1, 50, 10**6]),
            lower_tiers=rand.choice([LowerTiers.MEASURED] * 4 + [LowerTiers.ALWAYS, LowerTiers.NEVER]),
        ),
        blocks=Blocks(
            total,
            free,
            evictable,
            rand.choice([0, 0, 0, 1, 5]),
            0 if crowded else rand.randint(0, total - free - evictable),
        ),
        cpu=room(),
        ssd=room(),
        rates=Rates(*(rand.choice([0, 1_000, 10**9]) if tiers else 0 for _ in range(10))),
        running=rows_of(RunningTable, [_running_row(rand, id_, run_ids, size) for id_ in run_ids]),
        ending=ending(*({"id": id_, "held_blocks": 1} for id_ in end_ids[: rand.randint(0, 2)])),
        waiting=rows_of(WaitingTable, lines),
        candidates=candidates(*(_candidate_row(rand, line, run_ids, size, evictable) for line in looked)),
        ended=rows_of(EndedTable, [_ended_row(rand, 10_000 + n) for n in range(rand.choice([0, 0, 1, 20]))]),
        memory=rand.choice([PolicyMemory(), PolicyMemory("other", 2, b"xyz")]),
        policy=random_choice(rand, policy),
        waiting_policy=_policy_rows(rand, n_wait),
        tenants=_tenants(rand),
        histograms=HistogramTable(
            tenant=np.array([1, 2], np.uint32),
            endpoint=np.array([0, 1], np.uint32),
            counts=np.array([rand.randint(0, 9) * (n % 32 < 8) for n in range(2 * HISTOGRAM_BUCKETS)], np.uint32),
        ),
    )


def random_choice(rand: random.Random, policy: str = "") -> PolicyChoice:
    """`policy` or any, some of its parameters set to anything that is allowed."""
    kind = rand.choice([kind for kind in BUILT_IN.kinds if policy in ("", kind.name)])
    chosen = sorted(rand.sample(kind.parameters, rand.randint(0, len(kind.parameters))), key=lambda p: p.name)
    values = tuple((p.name, rand.choice([p.minimum, p.maximum, rand.randint(p.minimum, p.maximum)])) for p in chosen)
    return PolicyChoice(kind.name, values)


def _policy_rows(rand: random.Random, n_wait: int) -> WaitingPolicyTable:
    rows = sorted(rand.sample(range(n_wait), rand.randint(0, n_wait)))
    return WaitingPolicyTable(
        policy_row=np.array(rows, np.uint32),
        policy_a=np.array([rand.randint(0, 9) for _ in rows], np.int64),
        policy_b=np.array([rand.randint(0, 3) for _ in rows], np.int64),
    )


def _tenants(rand: random.Random) -> TenantTable:
    limited = rand.random() < 0.3
    rows = [
        {
            "tenant": tenant,
            "weight": rand.choice([1, 500, 1000, 3000]),
            "max_rows": rand.choice([0, 1, 2, 5]) if limited else 0,
            "max_waiting_tokens": rand.choice([0, 0, 100, 500]) if limited else 0,
            "served_prompt_tokens": rand.randint(0, 10**6),
            "served_cached_tokens": rand.randint(0, 10**6),
            "served_generated_tokens": rand.randint(0, 10**6),
        }
        for tenant in rand.sample(range(5), rand.randint(0, 5))
    ]
    table: TenantTable = rows_of(TenantTable, rows)
    return table


def _running_row(rand: random.Random, id_: int, ids: list[int], size: int) -> dict[str, int]:
    prompt, generated = rand.randint(1, 80), rand.randint(0, 20)
    decodes = rand.random() < 0.5
    computed = prompt + generated - 1 if decodes else rand.randint(0, prompt + generated)
    in_flight = rand.randint(0, prompt + generated - computed)
    held = rand.randint(-(-(computed + in_flight) // size), -(-(prompt + generated) // size) + 1)
    others = [other for other in ids if other != id_]
    return {
        "id": id_,
        "arrival_us": rand.randint(0, 5),
        "priority": rand.randint(-100, 100),
        "prompt_tokens": prompt,
        "generated_tokens": generated,
        "max_new_tokens": generated + rand.randint(1, 30),
        "computed_tokens": computed,
        "in_flight_tokens": in_flight,
        "held_blocks": held,
        "shared_blocks": rand.randint(0, held),
        "lower_blocks": rand.randint(0, held),
        "preemptions": rand.randint(0, 2),
        "waits_for": rand.choice([0] * 6 + others),
        "loading": rand.choice([0, 0, 0, 1]),
        "features": rand.getrandbits(64),
        "admitted_us": rand.randint(0, 9),
        **_wishes(rand),
        "policy_a": rand.randint(0, generated),
        "policy_b": rand.randint(0, 3),
    }


def _ended_row(rand: random.Random, id_: int) -> dict[str, int]:
    return {
        "id": id_,
        "prompt_tokens": rand.randint(1, 5000),
        "generated_tokens": rand.randint(0, 5000),
        "predicted_p50": rand.choice([-1, 1, 300]),
        "outcome": rand.choice([Outcome.STOP, Outcome.LENGTH, Outcome.ABORTED]),
        "features": rand.getrandbits(64),
    }


def _waiting_row(rand: random.Random, id_: int, pool: int) -> dict[str, int]:
    return {
        "id": id_,
        "arrival_us": rand.randint(0, 5),
        "tokens": rand.randint(1, min(200, pool + 3)),
        "new_tokens": rand.randint(1, 50),
        "priority": rand.randint(-100, 100),
        "preemptions": rand.randint(0, 2),
        "generated_tokens": rand.randint(0, 9),
        **_wishes(rand),
    }


def _wishes(rand: random.Random) -> dict[str, int]:
    """Tenant, deadlines and prediction."""
    return {
        "tenant": rand.randint(0, 5),
        "ttft_deadline_us": rand.choice([0, 0, rand.getrandbits(40)]),
        "deadline_us": rand.choice([0, 0, rand.getrandbits(40)]),
        "predicted_p50": rand.choice([-1, 0, 5, 100]),
    }


def _candidate_row(
    rand: random.Random, line: dict[str, int], ids: list[int], size: int, evictable: int
) -> dict[str, int]:
    hit = rand.randint(0, line["tokens"] // size)
    return {
        "id": line["id"],
        "device_hit_blocks": hit,
        "unheld_hit_blocks": rand.randint(0, min(hit, evictable)),
        "pending_blocks": rand.choice([0, 0, 1]),
        "cpu_hit_blocks": rand.choice([0, 0, 3]),
        "ssd_hit_blocks": rand.choice([0, 0, 2]),
        "features": rand.getrandbits(64),
        "pending_owner": rand.choice([0, *ids]),
    }
