"""The recorder never holds the executor up: what it cannot write it drops, counts and marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_svc.decision_log import QUEUE_FRAMES, DecisionRecorder
from jitney.decision_log import Frame
from jitney.errors import Conflict, InvalidRequest
from jitney.log_segments import LogReader, segments
from tests.support.processes import wait_until
from tests.support.recorded import recorded

CAP = 16 << 20


def frames_of(folder: Path) -> list[Frame]:
    with LogReader(folder) as reader:
        return list(reader)


def test_all_that_was_recorded_is_in_the_log(tmp_path: Path) -> None:
    pairs = list(recorded()[:100])
    recorder = DecisionRecorder(tmp_path, CAP)
    for number, (snapshot, decision) in enumerate(pairs):
        recorder.record(snapshot, decision, number)
    recorder.close()
    assert [(f.snapshot, f.decision) for f in frames_of(tmp_path)] == pairs
    stats = recorder.stats()
    assert (stats.frames, stats.dropped) == (100, 0)
    assert stats.bytes_written == sum(path.stat().st_size for path in segments(tmp_path))
    assert stats.cpu_us > 0


def test_a_full_queue_drops_and_the_log_says_so(tmp_path: Path) -> None:
    pairs = list(recorded()[:8])
    recorder = DecisionRecorder(tmp_path, CAP)
    with recorder._bell:  # the writer stands still; `record` is called by the one who holds the bell
        for number in range(QUEUE_FRAMES + 50):
            recorder.record(*pairs[number % 8], 0)
    assert recorder.stats().dropped == 50
    wait_until(lambda: recorder.stats().frames == QUEUE_FRAMES, 60)
    wait_until(lambda: recorder._room)
    recorder.record(*pairs[0], 0)
    recorder.close()
    frames = frames_of(tmp_path)
    assert len(frames) == QUEUE_FRAMES + 1
    assert [frame.gap for frame in frames] == [False] * QUEUE_FRAMES + [True]


def test_a_disk_that_fails_costs_frames_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.decision_log.RETRY_S", 0.0)
    folder = tmp_path / "log"
    recorder = DecisionRecorder(folder, CAP)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("in the way")  # no segment can be opened
    recorder.record(*recorded()[0], 0)
    wait_until(lambda: recorder.stats().dropped == 1)
    folder.unlink()
    recorder.record(*recorded()[1], 0)
    recorder.close()
    frames = frames_of(folder)
    assert [(f.snapshot, f.gap) for f in frames] == [(recorded()[1][0], True)]


def test_one_writer_a_folder(tmp_path: Path) -> None:
    recorder = DecisionRecorder(tmp_path, CAP)
    with pytest.raises(Conflict):
        DecisionRecorder(tmp_path, CAP)
    recorder.close()
    DecisionRecorder(tmp_path, CAP).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest):
        DecisionRecorder(tmp_path / "file" / "log", CAP)
