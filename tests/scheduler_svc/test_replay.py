"""Replay finds what differs, and nothing else; it refuses another build and shows what a log lacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jitney.errors import Conflict
from jitney.log_segments import LogReader
from jitney.scheduler_codec import decode_decision, encode_decision
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.replay import Replayed, main, replay
from tests.support.recorded import recorded, write_segment


def replayed(path: Path, *, any_build: bool = False) -> Replayed:
    with LogReader(path) as log:
        return replay(log, BUILT_IN, any_build=any_build)


def test_what_this_build_decided_it_decides_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jlog"
    write_segment(path, recorded(60))
    result = replayed(path)
    assert (result.frames, result.equal, result.different) == (60, 60, 0)
    assert result.builds == [BUILT_IN.build] and result.policies == ["fcfs"]


def test_a_decision_that_differs_is_found_and_named(tmp_path: Path) -> None:
    pairs = list(recorded(60))
    decision = decode_decision(pairs[20][1])
    pairs[20] = (pairs[20][0], encode_decision(replace(decision, wake_at_us=77, needed_blocks=99)))
    path = tmp_path / "a.jlog"
    write_segment(path, pairs)
    result = replayed(path)
    assert (result.equal, result.different) == (59, 1)
    assert result.first_different == f"step {decision.step}: wake_at_us, needed_blocks"


def test_another_build_is_refused_unless_it_may_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jlog"
    pairs = [(s, encode_decision(replace(decode_decision(d), build="0.0.9+abc"))) for s, d in recorded(60)[:5]]
    write_segment(path, pairs)
    with pytest.raises(Conflict) as refused:
        replayed(path)
    assert refused.value.value == "0.0.9+abc" and refused.value.limit == BUILT_IN.build
    assert replayed(path, any_build=True).equal == 5
    assert main([str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "0.0.9+abc" in said.err
    assert main([str(path), "--any-build"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["equal"] == 5


def test_a_log_that_is_none_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


OWN = """
from scheduler_svc.policies.base import Policy, Ranking

class Newest(Policy):
    name = "newest"
    summary = "Last come, first served."
    waiting_columns = ("arrival_us",)

    def rank(self, snapshot, memory):
        return Ranking(running=(-snapshot.running.arrival_us,), waiting=(-snapshot.waiting.arrival_us,))
"""


def test_a_log_of_a_policy_of_ones_own_is_replayed_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jitney.scheduler_codec import decode_snapshot, encode_snapshot
    from jitney.snapshot import PolicyChoice
    from scheduler_svc.decide import decide
    from scheduler_svc.policies.custom import with_custom

    source = tmp_path / "mine.py"
    source.write_text(OWN)
    book = with_custom(f"{source}:Newest")
    pairs = []
    for shown, _ in recorded(60)[:20]:
        snapshot = encode_snapshot(replace(decode_snapshot(shown), policy=PolicyChoice("newest")))
        pairs.append((snapshot, encode_decision(decide(decode_snapshot(snapshot), book))))
    path = tmp_path / "a.jlog"
    write_segment(path, pairs)
    assert main([str(path), f"--policy-file={source}:Newest"]) == 0
    assert main([str(path)]) == 2
    capsys.readouterr()
