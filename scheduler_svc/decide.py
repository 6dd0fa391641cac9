"""THE function of the scheduler: a snapshot in, a decision out, and nothing else read or kept.

A step has no phases: every row has tokens computed and tokens wanted, and a step gives it some of the difference.

    1. Put the running rows in the policy's order, as they will stand once the launched steps have ended.
    2. Deal tokens: one to each decode, then chunks of several prefills, long prompts at most half of the rest.
    3. Deal blocks to the rows that grow. If there are too few, preempt those whose leaving frees enough at least
       cost; a row that still gets none sits out. In such a step nobody boards.
    4. Keep blocks for what runs: about to grow, at its preemption bound, joined to a prefix, configured.
    5. Board waiting requests in the policy's order, by the whole prompt, until one does not fit.
    6. What is left of the tokens goes to the chunks that could be larger.
    7. Name the next requests to look up, whom to preempt should decisions stop coming, and why each one waits.

Equal snapshots give equal decisions on any machine: integers, arrays and stable sorts only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jitney.columns import I64, PreemptColumns, RunColumns
from jitney.decision import Decision
from jitney.snapshot import MAX_CANDIDATES, HorizonKind, Snapshot
from scheduler_svc.accepts import accept
from scheduler_svc.admission import Boarding, board, hopeless, refusals
from scheduler_svc.budget import Budget, Reserve, reserve_for
from scheduler_svc.candidates import next_candidates
from scheduler_svc.chunking import deal, top_up
from scheduler_svc.memory import Memory
from scheduler_svc.ordering import first_waiting, running_order
from scheduler_svc.policies import BUILT_IN, PolicyBook
from scheduler_svc.policies.base import Ranking
from scheduler_svc.preemption import Relief, coast_order, relieve
from scheduler_svc.reasons import count_reasons
from scheduler_svc.running import RunningRows, plan_rows


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision with what led to it, for `explain`."""

    decision: Decision
    ranking: Ranking
    rows: RunningRows
    tokens: I64  # [R] of `rows`
    relief: Relief
    reserve: Reserve
    boarding: Boarding
    order: I64  # the first waiting requests, without refused ones


def decide(snapshot: Snapshot, policies: PolicyBook = BUILT_IN) -> Decision:
    """What the executor is to do in `snapshot.step`. InvalidRequest for a policy or setting that is not built.

    `snapshot` is one that `jitney.snapshot_checks.check` lets pass.
    """
    return plan(snapshot, policies).decision


def plan(snapshot: Snapshot, policies: PolicyBook = BUILT_IN) -> Plan:
    """`decide`, with its reasons."""
    settings, waiting = snapshot.settings, snapshot.waiting.rows
    policy, memory = policies.choose(snapshot.policy), Memory.read(snapshot.memory)
    accept(snapshot, policy)
    ranking = policy.rank(snapshot, memory.get(policy.name, policy.memory_version))
    memory.put(policy.name, policy.memory_version, ranking.memory)
    budget = Budget.of(snapshot)
    rows = plan_rows(snapshot, *running_order(snapshot, ranking))
    lost = hopeless(snapshot)
    refused = refusals(snapshot, lost)

    tokens = deal(rows, settings.max_rows, budget.tokens, settings.chunk_cap_tokens, others_wait=waiting > 0)
    relief = relieve(snapshot, rows, tokens, budget)
    tokens = relief.tokens
    needed = int(rows.growth_of(tokens).sum())
    stays = np.ones(rows.count, np.bool_)
    stays[relief.victims] = False
    remaining = rows.keep(stays) if len(relief.victims) else rows
    budget.rows -= remaining.count
    budget.blocks += relief.freed - needed
    budget.tokens -= int(tokens.sum())

    reserve = reserve_for(snapshot, remaining, tokens[stays])
    order = first_waiting(snapshot, ranking, max(budget.rows, 0) + 1 + MAX_CANDIDATES + len(refused))
    order = order if lost is None else order[~lost[order]]
    closed = len(relief.victims) > 0 or bool(relief.starved.any())
    boarding = board(snapshot, order, remaining, budget, reserve, closed=closed)
    ran = int(tokens.sum())
    out = relief.starved | ~stays
    tokens = top_up(rows, tokens, budget.tokens, settings.max_rows, settings.chunk_cap_tokens, out)
    boarding.top_up(budget.tokens - (int(tokens.sum()) - ran), settings.chunk_cap_tokens)

    left = waiting - len(boarding.rows) - (0 if lost is None else int(np.count_nonzero(lost)))
    runs = tokens > 0
    decision = Decision(
        incarnation=snapshot.incarnation,
        step=snapshot.step,
        attempt=snapshot.attempt,
        snapshot_digest=snapshot.digest,
        build=policies.build,
        run=RunColumns(id=rows.id[runs], tokens=tokens[runs].astype(np.int32)),
        admit=boarding.columns(snapshot),
        preempt=_preempt_columns(rows, relief),
        next_candidates=next_candidates(snapshot, order, len(boarding.rows)),
        coast_victims=coast_order(remaining),
        horizon_kind=HorizonKind.STEPS,
        horizon_steps=1,
        wake_at_us=ranking.wake_at_us,
        waiting_reasons=count_reasons(left, boarding, rows, tokens, relief),
        memory=memory.write(policy.name),
        refusals=refused,
        policy_updates=ranking.updates,
        chunk_cap_tokens=settings.chunk_cap_tokens,
        block_reserve=settings.block_reserve,
        needed_blocks=needed,
    )
    return Plan(decision, ranking, rows, tokens, relief, reserve, boarding, order)


def _preempt_columns(rows: RunningRows, relief: Relief) -> PreemptColumns:
    return PreemptColumns(
        id=rows.id[relief.victims],
        mode=relief.modes.astype(np.uint8),
        recompute_us=relief.recompute_us,
        move_us=relief.move_us,
        for_id=np.zeros(len(relief.victims), np.uint64),
    )
