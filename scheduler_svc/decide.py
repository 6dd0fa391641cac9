"""THE function of the scheduler: a snapshot in, a decision out, and nothing else read or kept.

A step has no phases: every row has tokens computed and tokens wanted, and a step gives it some of the difference.

    1. Put the running rows in the policy's order, as they will stand once the launched steps have ended.
    2. Deal tokens: one to each decode, then chunks of several prefills, long prompts at most half of the rest.
    3. Deal blocks to the rows that grow. If there are too few, preempt those whose leaving frees enough at least
       cost; a row that still gets none sits out. In such a step nobody boards.
    4. Keep blocks for what runs: about to grow within the horizon, at its preemption bound, joined to a prefix,
       configured.
    5. Board waiting requests in the policy's order, by the whole prompt, until one does not fit; where it outranks
       running rows, or where it pays, these make room for it. Tenants at their quota hold up nobody. What a lower
       tier has of them is loaded if that is faster than to compute it.
       In static mode: a whole batch, once nothing runs, or nobody.
    6. What is left of the tokens goes to the chunks that could be larger.
    7. Name substitutes for rows that may end within the horizon, if rows are what is short.
    8. Name the next requests to look up, whom to preempt should decisions stop coming, and why each one waits.

Equal snapshots give equal decisions on any machine: integers, arrays and stable sorts only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jitney.columns import I64, U64, PreemptColumns, RunColumns
from jitney.decision import Decision, Refusal
from jitney.snapshot import MAX_CANDIDATES, PolicyMemory, Snapshot
from scheduler_svc.accepts import accept
from scheduler_svc.admission import Boarding
from scheduler_svc.batching import Batch
from scheduler_svc.budget import Budget, Reserve, reserve_for
from scheduler_svc.candidates import next_candidates
from scheduler_svc.chunking import deal, top_up
from scheduler_svc.displacement import Displacement
from scheduler_svc.horizon import Horizon, horizon_of
from scheduler_svc.lengths import with_lengths
from scheduler_svc.lookahead import ends_within, prefetches, soon_free, substitute_columns, substitutes
from scheduler_svc.memory import Memory
from scheduler_svc.ordering import running_order
from scheduler_svc.policies import BUILT_IN, PolicyBook
from scheduler_svc.policies.base import Ranking
from scheduler_svc.preemption import Relief, coast_order, relieve
from scheduler_svc.quotas import Quotas, line
from scheduler_svc.reasons import count_reasons
from scheduler_svc.refusals import refuse
from scheduler_svc.running import RunningRows, plan_rows
from scheduler_svc.step_time import step_size


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decided, with what led to it."""

    ranking: Ranking
    rows: RunningRows
    tokens: I64  # [R] of `rows`
    relief: Relief
    horizon: Horizon
    reserve: Reserve
    refusals: tuple[Refusal, ...]
    order: I64  # the first waiting requests, without refused ones
    boarding: Boarding
    standby: Boarding
    budget: Budget  # what nobody took
    padding: U64
    left: int  # requests that neither board nor are refused
    held_back: int  # of these, those that wait for nothing but their tenant's quota
    memory: PolicyMemory


def decide(snapshot: Snapshot, policies: PolicyBook = BUILT_IN) -> Decision:
    """What the executor is to do in `snapshot.step`. InvalidRequest for a policy or setting that is not built.

    `snapshot` is one that `jitney.snapshot_checks.check` lets pass.
    """
    return _told(snapshot, plan(snapshot, policies), policies.build)


def plan(snapshot: Snapshot, policies: PolicyBook = BUILT_IN) -> Plan:
    """`decide`, with its reasons."""
    settings, waiting = snapshot.settings, snapshot.waiting.rows
    policy, memory = policies.choose(snapshot.policy), Memory.read(snapshot.memory)
    accept(snapshot, policy)
    snapshot = with_lengths(snapshot, memory, wanted=policy.reads_lengths)
    ranking = policy.rank(snapshot, memory.get(policy.name, policy.memory_version))
    memory.put(policy.name, policy.memory_version, ranking.memory)
    rows, batch = plan_rows(snapshot, *running_order(snapshot, ranking)), Batch.of(snapshot)
    budget = Budget.of(snapshot, step_size(snapshot, rows), len(batch.padding))
    refusals, among = refuse(snapshot, ranking.refusals)
    quotas = Quotas.of(snapshot)

    tokens = deal(rows, settings.max_rows, budget.tokens, settings.chunk_cap_tokens, others_wait=waiting > 0)
    budget.coming += soon_free(rows, tokens)
    relief = relieve(snapshot, rows, tokens, budget)
    tokens, growth = relief.tokens, rows.growth_of(relief.tokens)
    horizon = horizon_of(snapshot, rows, tokens, budget.blocks + relief.freed)
    stays = np.ones(rows.count, np.bool_)
    stays[relief.victims] = False
    remaining = rows.keep(stays) if len(relief.victims) else rows
    budget.rows -= remaining.count
    budget.blocks += relief.freed - int(growth.sum())
    budget.tokens -= int(tokens.sum())

    reserve = reserve_for(snapshot, remaining, tokens[stays], (horizon.growth - growth)[stays])
    order = line(snapshot, ranking, max(budget.rows, 0) + 1 + MAX_CANDIDATES, among, quotas)
    closed = len(relief.victims) > 0 or bool(np.count_nonzero(relief.starved))
    displacement = Displacement.of(snapshot, ranking, rows, relief, budget)
    boarding = batch.board(snapshot, order, remaining, budget, reserve, closed=closed, displacement=displacement)
    relief = displacement.told(relief)
    tokens, stays[relief.victims] = relief.tokens, False
    ran = int(tokens.sum())
    out = relief.starved | ~stays
    tokens = top_up(rows, tokens, budget.tokens, settings.max_rows, settings.chunk_cap_tokens, out)
    budget.tokens = boarding.top_up(budget.tokens - (int(tokens.sum()) - ran), settings.chunk_cap_tokens)
    standby = Boarding()
    if boarding.lacks_rows:
        ends = ends_within(rows, tokens, horizon)
        standby = substitutes(snapshot, order, remaining, boarding, budget, reserve, ends)
    left = waiting - len(boarding.rows) - len(refusals)
    return Plan(
        ranking=ranking,
        rows=rows,
        tokens=tokens,
        relief=relief,
        horizon=horizon.without(relief.victims),
        reserve=reserve,
        refusals=refusals,
        order=order,
        boarding=boarding,
        standby=standby,
        budget=budget,
        padding=batch.padding[:0] if closed else batch.padding,
        left=left,
        held_back=quotas.held_back(among) if quotas else 0,
        memory=memory.write(policy.name),
    )


def _told(snapshot: Snapshot, plan: Plan, build: str) -> Decision:
    """The plan as the executor is told it."""
    rows, runs, relief = plan.rows, plan.tokens > 0, plan.relief
    return Decision(
        incarnation=snapshot.incarnation,
        step=snapshot.step,
        attempt=snapshot.attempt,
        snapshot_digest=snapshot.digest,
        build=build,
        run=RunColumns(id=rows.id[runs], tokens=plan.tokens[runs].astype(np.int32)),
        admit=plan.boarding.columns(snapshot),
        preempt=_preempt_columns(rows, relief),
        prefetch=prefetches(snapshot, plan.order, plan.boarding.rows + plan.standby.rows),
        substitutes=substitute_columns(snapshot, plan.standby),
        next_candidates=next_candidates(snapshot, plan.order, len(plan.boarding.rows)),
        coast_victims=coast_order(rows.without(relief.victims)),
        horizon_kind=plan.horizon.kind,
        horizon_steps=plan.horizon.steps,
        wake_at_us=plan.ranking.wake_at_us,
        waiting_reasons=count_reasons(plan.left, plan.held_back, plan.boarding, rows, plan.tokens, relief),
        memory=plan.memory,
        refusals=plan.refusals,
        policy_updates=plan.ranking.updates,
        padding_rows=plan.padding,
        chunk_cap_tokens=snapshot.settings.chunk_cap_tokens,
        block_reserve=snapshot.settings.block_reserve,
        needed_blocks=plan.horizon.needed_blocks,
        skipped_load_blocks=plan.boarding.skipped_load_blocks,
    )


def _preempt_columns(rows: RunningRows, relief: Relief) -> PreemptColumns:
    return PreemptColumns(
        id=rows.id[relief.victims],
        mode=relief.modes.astype(np.uint8),
        recompute_us=relief.recompute_us,
        move_us=relief.move_us,
        for_id=relief.for_id,
    )
