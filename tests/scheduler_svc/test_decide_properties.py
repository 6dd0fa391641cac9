"""Whatever the possible snapshot, a decision keeps its invariants; equal snapshots give equal bytes."""

from __future__ import annotations

from hypothesis import given, settings

from jitney.scheduler_codec import decode_decision, decode_snapshot, encode_decision, encode_snapshot
from jitney.snapshot import Snapshot
from jitney.snapshot_checks import check
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from tests.support.decision_checks import check_decision
from tests.support.situations import snapshots


@settings(max_examples=4000, deadline=None)
@given(snapshots())
def test_invariants(snapshot: Snapshot) -> None:
    check(snapshot)
    check_decision(snapshot, decide(snapshot))


@settings(max_examples=400, deadline=None)
@given(snapshots(tiers=True))
def test_invariants_with_lower_tiers(snapshot: Snapshot) -> None:
    check(snapshot)
    check_decision(snapshot, decide(snapshot))


@settings(max_examples=100, deadline=None)
@given(snapshots())
def test_equal_snapshots_give_equal_bytes(snapshot: Snapshot) -> None:
    data = encode_snapshot(snapshot)
    first, second = (encode_decision(decide(decode_snapshot(data))) for _ in range(2))
    assert first == second
    assert encode_decision(decode_decision(first)) == first
    assert decode_decision(first).snapshot_digest == decode_snapshot(data).digest


@settings(max_examples=100, deadline=None)
@given(snapshots())
def test_every_request_is_explained(snapshot: Snapshot) -> None:
    decision = decide(snapshot)
    told = {
        "admitted": set(decision.admit.id.tolist()),
        "preempted": set(decision.preempt.id.tolist()),
        "refused": {r.id for r in decision.refusals},
    }
    for id_ in [*snapshot.running.id.tolist(), *snapshot.waiting.id.tolist(), *snapshot.ending.id.tolist()]:
        said = explain(snapshot, id_)
        assert said.sentence
        for state, ids in told.items():
            assert (said.state == state) == (id_ in ids)
