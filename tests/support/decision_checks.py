"""What every decision must keep, whatever the (possible) snapshot."""

from __future__ import annotations

import numpy as np

from jitney.decision import Decision, PreemptionMode, WaitReason
from jitney.snapshot import MAX_CANDIDATES, Batching, HorizonKind, Snapshot
from scheduler_svc.policies import BUILT_IN


def check_decision(snapshot: Snapshot, decision: Decision) -> None:
    """Asserts the invariants that hold between a snapshot and its decision."""
    settings, blocks = snapshot.settings, snapshot.blocks
    running = {int(i): n for n, i in enumerate(snapshot.running.id.tolist())}
    waiting = {int(i): n for n, i in enumerate(snapshot.waiting.id.tolist())}
    run, admit, victims = decision.run.id.tolist(), decision.admit.id.tolist(), decision.preempt.id.tolist()
    refused = [r.id for r in decision.refusals]

    assert (decision.incarnation, decision.step, decision.attempt) == (
        snapshot.incarnation,
        snapshot.step,
        snapshot.attempt,
    )
    assert decision.snapshot_digest == snapshot.digest
    assert set(run) <= set(running)
    assert set(victims) <= set(running)
    assert set(admit) | set(refused) <= set(waiting)
    assert len({*run, *admit, *victims, *refused}) == len(run) + len(admit) + len(victims) + len(refused)

    tokens = [*decision.run.tokens.tolist(), *decision.admit.tokens.tolist()]
    assert sum(tokens) <= settings.max_step_tokens
    assert all(t <= settings.chunk_cap_tokens for t in tokens)
    assert all(t >= 1 for t in decision.run.tokens.tolist())
    assert len(run) <= settings.max_rows
    assert not admit or len(running) - len(victims) + len(admit) <= settings.max_rows

    available = blocks.free + blocks.evictable + blocks.granted
    freed, grown = 0, 0
    for victim, mode in zip(victims, decision.preempt.mode.tolist(), strict=True):
        n = running[victim]
        held, shared = int(snapshot.running.held_blocks[n]), int(snapshot.running.shared_blocks[n])
        full = int(snapshot.running.computed_tokens[n] + snapshot.running.in_flight_tokens[n]) // settings.block_tokens
        stored = min(full, held) - shared
        all_free = mode == PreemptionMode.RECOMPUTE or stored <= int(snapshot.running.lower_blocks[n])
        freed += held - shared - (0 if all_free else max(stored, 0))
    for id_, count in zip(run, decision.run.tokens.tolist(), strict=True):
        n = running[id_]
        assert snapshot.running.waits_for[n] == 0 and snapshot.running.loading[n] == 0
        after = int(snapshot.running.computed_tokens[n]) + int(snapshot.running.in_flight_tokens[n]) + count
        grown += max(0, -(-after // settings.block_tokens) - int(snapshot.running.held_blocks[n]))
        assert after <= int(snapshot.running.prompt_tokens[n]) + int(snapshot.running.max_new_tokens[n])
    assert decision.horizon_kind is settings.horizon_kind and 1 <= decision.horizon_steps <= settings.horizon_steps
    assert decision.needed_blocks >= grown
    if settings.horizon_steps == 1 or settings.horizon_kind is HorizonKind.UNTIL_EVENT:
        assert decision.needed_blocks == grown
    else:
        assert decision.horizon_steps == 1 or decision.needed_blocks <= available + freed
    hits = dict(zip(snapshot.candidates.id.tolist(), zip(*_hit_columns(snapshot), strict=True), strict=True))
    unheld = 0
    for id_, first, taken, loaded in zip(*(c.tolist() for _, c in decision.admit.columns()), strict=True):
        total = -(-int(snapshot.waiting.tokens[waiting[id_]]) // settings.block_tokens)
        hit, free_hit, pending = hits.get(id_, (0, 0, 0))
        assert taken == max(total - hit, 0)
        assert first >= 1 or pending > 0 or loaded > 0
        assert 0 <= loaded <= taken and (not loaded or first == 0)
        unheld += free_hit
    assert int(decision.admit.blocks.sum()) + unheld + grown <= available + freed
    named = decision.substitutes.id.tolist()
    assert len(set(named)) == len(named) <= settings.max_rows and set(named) <= set(waiting) - set(admit) - set(refused)
    assert all(1 <= t <= settings.chunk_cap_tokens for t in decision.substitutes.tokens.tolist())
    assert sum(tokens) + sum(t - 1 for t in decision.substitutes.tokens.tolist()) <= settings.max_step_tokens
    unheld += sum(hits.get(id_, (0, 0, 0))[1] for id_ in named)
    taken = int(decision.admit.blocks.sum()) + int(decision.substitutes.blocks.sum())
    assert not named or taken + unheld + grown <= available + freed
    static = settings.batching is not Batching.CONTINUOUS
    assert not static or (not named and not (admit and (running or snapshot.ending.rows)))
    padding = decision.padding_rows.tolist()
    assert set(padding) <= set(snapshot.ending.id.tolist())
    assert not padding or (settings.batching is Batching.STATIC_PADDED and running and not victims)
    _check_displaced(snapshot, decision)

    assert len(decision.next_candidates) <= MAX_CANDIDATES
    assert set(decision.next_candidates.tolist()) <= set(waiting) - set(admit) - set(refused)
    assert set(decision.coast_victims.tolist()) <= set(running) - set(victims)
    owners = set(snapshot.running.waits_for[snapshot.running.waits_for != 0].tolist())
    stuck = {i for i, n in running.items() if snapshot.running.held_blocks[n] >= blocks.total}
    assert not (set(decision.coast_victims.tolist()) | set(victims) - stuck) & owners or not run

    reasons = [reason for reason, _ in decision.waiting_reasons]
    assert reasons == sorted(set(reasons)) and WaitReason.UNSPECIFIED not in reasons
    left = len(waiting) - len(admit) - len(refused)
    assert sum(count for _, count in decision.waiting_reasons) >= left
    assert np.all(np.array([count for _, count in decision.waiting_reasons], int) > 0)


def _check_displaced(snapshot: Snapshot, decision: Decision) -> None:
    """Who boards in a step that preempts outranks those that left, or got their room."""
    if not decision.preempt.rows:
        return
    ranking = BUILT_IN.choose(snapshot.policy).rank(snapshot, b"")
    named = {int(i) for i in decision.preempt.for_id.tolist()} - {0}
    assert named <= set(snapshot.waiting.id.tolist())
    if 0 in decision.preempt.for_id.tolist():
        assert ranking.waiting_class is not None or not decision.admit.rows
    for for_id in named:
        modes = decision.preempt.mode[decision.preempt.for_id == for_id]
        if (modes == PreemptionMode.RECOMPUTE).all():
            assert for_id in decision.admit.id.tolist()


def _hit_columns(snapshot: Snapshot) -> tuple[list[int], list[int], list[int]]:
    table = snapshot.candidates
    return table.device_hit_blocks.tolist(), table.unheld_hit_blocks.tolist(), table.pending_blocks.tolist()
