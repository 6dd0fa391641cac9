"""A shadow decides in the situations of another, from its own memory, and tells how often it would do otherwise."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jitney.decision_log import Frame
from jitney.errors import InvalidRequest
from jitney.log_segments import LogWriter
from jitney.scheduler_codec import decode_decision, decode_snapshot, encode_decision
from jitney.snapshot import PolicyChoice
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.shadow import Shadow, main
from tests.support.recorded import recorded, write_segment

ROOT = Path(__file__).parents[2]


def followed(decided_by: PolicyChoice, shadow_of: PolicyChoice, steps: int = 150) -> Shadow:
    shadow = Shadow(shadow_of, BUILT_IN)
    for snapshot, decision in recorded(steps, 7, decided_by):
        shadow.follow(Frame(snapshot, decision))
    return shadow


@pytest.mark.parametrize("name", [kind.name for kind in BUILT_IN.kinds])
def test_a_policy_that_shadows_itself_decides_alike_from_its_own_memory(name: str) -> None:
    shadow = Shadow(PolicyChoice(name), BUILT_IN)
    for snapshot, decision in recorded(150, 7, PolicyChoice(name)):
        found, recorded_decision = shadow.follow(Frame(snapshot, decision)), decode_decision(decision)
        assert found.admit.id.tolist() == recorded_decision.admit.id.tolist()
        assert found.policy_updates.id.tolist() == recorded_decision.policy_updates.id.tolist()
        assert found.memory.content == recorded_decision.memory.content
    assert (shadow.found.steps, shadow.found.any_of_them) == (150, 0)


def test_another_policy_is_told_apart() -> None:
    found = followed(PolicyChoice(), PolicyChoice("priority")).found
    assert 0 < found.admissions < found.steps
    assert found.order and found.admitted_by_it_alone
    assert found.any_of_them >= max(found.admissions, found.preemptions, found.order)
    assert "150 steps of fcfs" in found.line()


def test_columns_that_the_log_lacks_are_named() -> None:
    found = followed(PolicyChoice(), PolicyChoice("deadline")).found
    assert "waiting.deadline_us" in found.columns_unknown


def test_unknown_policies_and_parameters_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest):
        Shadow(PolicyChoice("nobody"), BUILT_IN)
    write_segment(tmp_path / "a.jlog", recorded(60)[:3])
    for argv in (["--policy=nobody"], ["--policy=fcfs", "x=1"], ["--policy=fcfs", "x=y"]):
        assert main([str(tmp_path / "a.jlog"), "--once", *argv]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 3


def test_a_live_log_is_followed_until_interrupted(tmp_path: Path) -> None:
    pairs = recorded(150)
    writer = LogWriter(tmp_path, 1 << 20)
    writer.append(*pairs[0], 0)
    argv = [sys.executable, "-m", "scheduler_svc.shadow", str(tmp_path), "--policy=sjf", "--every=0"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("1 steps of fcfs")
        for pair in pairs[1:40]:
            writer.append(*pair, 0)
        assert any(line.startswith("40 steps of fcfs") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        last = process.stdout.read().splitlines()[-1]
        assert process.wait() == 0
    writer.close()
    assert json.loads(last)["steps"] == 40 and json.loads(last)["policy"] == "sjf"


def test_what_it_is_shown_is_not_changed() -> None:
    snapshot, decision = recorded(60)[30]
    before = encode_decision(decode_decision(decision))
    shadow = Shadow(PolicyChoice("mlfq"), BUILT_IN)
    shadow.follow(Frame(snapshot, decision))
    assert encode_decision(decode_decision(decision)) == before
    assert decode_snapshot(snapshot).policy.name == "fcfs"
