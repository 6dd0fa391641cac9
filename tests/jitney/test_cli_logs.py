"""`jitney replay`, `what-if` and `shadow` run the services' own programs and pass on what they say and how they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.recorded import recorded, write_segment

ROOT = Path(__file__).parents[2]


def jitney(*argv: str) -> tuple[int, list[str], list[str]]:
    """Exit status and lines of stdout and stderr."""
    command = [sys.executable, "-c", "from jitney.cli import main; main()", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def test_replay(tmp_path: Path) -> None:
    log = tmp_path / "a.jlog"
    write_segment(log, recorded(60))
    status, lines, _ = jitney("replay", str(log))
    assert status == 0 and json.loads(lines[-1])["equal"] == 60
    damaged = bytearray(log.read_bytes())
    damaged[-1] ^= 1
    log.write_bytes(damaged)
    status, lines, _ = jitney("replay", str(log), "--any-build")
    assert (status, json.loads(lines[-1])["damaged"]) == (0, 1)


def test_what_if_and_shadow(tmp_path: Path) -> None:
    log = tmp_path / "a.jlog"
    write_segment(log, recorded(60))
    status, lines, _ = jitney("what-if", str(log), "--policy", "mlfq", "levels=3")
    assert status == 0 and json.loads(lines[-1])["parameters"] == {"levels": 3}
    status, lines, _ = jitney("shadow", str(log), "--policy", "sjf", "--once")
    assert status == 0 and json.loads(lines[-1])["steps"] == 60


def test_what_cannot_be_read_is_one_sentence_and_exit_status_2(tmp_path: Path) -> None:
    for command in (("replay",), ("what-if", "--policy=fcfs"), ("shadow", "--policy=fcfs")):
        status, lines, errors = jitney(command[0], str(tmp_path / "nothing"), *command[1:])
        assert (status, lines, len(errors)) == (2, [], 1)
        assert "nothing" in errors[0]
