"""Whatever the possible snapshot, a decision keeps its invariants; equal snapshots give equal bytes."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import numpy as np
from hypothesis import given, settings

from jitney.scheduler_codec import decode_decision, decode_snapshot, encode_decision, encode_snapshot
from jitney.snapshot import Snapshot
from jitney.snapshot_checks import check
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from tests.support.decision_checks import check_decision
from tests.support.situations import random_snapshot, snapshots


@settings(max_examples=150, deadline=None)
@given(snapshots(tiers=True))
def test_invariants(snapshot: Snapshot) -> None:
    check(snapshot)
    check_decision(snapshot, decide(snapshot))


def test_invariants_over_many_seeds() -> None:
    for seed in range(1500):
        rand = random.Random(seed)
        most = 60 if seed % 50 == 0 else 10
        snapshot = random_snapshot(rand, rand.randint(0, most), rand.randint(0, 2 * most), tiers=seed % 2 == 0)
        check(snapshot)
        check_decision(snapshot, decide(snapshot))


@settings(max_examples=60, deadline=None)
@given(snapshots())
def test_equal_snapshots_give_equal_bytes(snapshot: Snapshot) -> None:
    data = encode_snapshot(snapshot)
    first, second = (encode_decision(decide(decode_snapshot(data))) for _ in range(2))
    assert first == second
    assert encode_decision(decode_decision(first)) == first
    assert decode_decision(first).snapshot_digest == decode_snapshot(data).digest


@settings(max_examples=60, deadline=None)
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


def digest_of_decisions() -> str:
    """Of many decisions, some over thousands of rows with few distinct arrivals."""
    digest = hashlib.sha256()
    for seed in range(120):
        rand = random.Random(seed)
        most = 3000 if seed % 60 == 0 else 30
        snapshot = random_snapshot(rand, rand.randint(0, 30), rand.randint(0, most), tiers=seed % 2 == 0)
        digest.update(encode_decision(decide(decode_snapshot(encode_snapshot(snapshot)))))
    return digest.hexdigest()


def test_processors_decide_alike() -> None:
    """With numpy's fast paths for newer processors switched off the same bytes come out."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    code = "from tests.scheduler_svc.test_decide_properties import digest_of_decisions as d; print(d())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    if found:
        env["NPY_DISABLE_CPU_FEATURES"] = " ".join(found)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest_of_decisions()
