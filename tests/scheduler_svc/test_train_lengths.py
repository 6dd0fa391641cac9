"""Lengths learned offline: from a trace and from a log, the same table each time, and as integers what was learned."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from jitney.columns import EndedTable
from jitney.decision import Decision
from jitney.features import Feature
from jitney.log_segments import LogWriter
from jitney.scheduler_codec import encode_decision, encode_snapshot
from jitney.snapshot import Outcome, Snapshot
from scheduler_svc.length_samples import read_samples
from scheduler_svc.lengths.scale import length_of, log_of
from scheduler_svc.lengths.trees import inputs_of, read_table
from scheduler_svc.train_lengths import main, train
from tests.support.situations import rows_of

pytest.importorskip("sklearn")
BRIEF = 1 << 8 * Feature.BRIEF


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Briefly asked ones get 16 tokens, others as many as their prompt has; give or take a quarter."""
    rand, path = random.Random(3), tmp_path / "trace.csv"
    lines = ["tenant,prompt_tokens,generated_tokens,features"]
    for _ in range(400):
        brief, prompt = rand.random() < 0.5, rand.choice([40, 160, 640])
        length = round((16 if brief else prompt) * 2 ** rand.uniform(-0.25, 0.25))
        lines.append(f"{rand.randrange(2)},{prompt},{length},{BRIEF if brief else 0}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_it_learns_what_history_cannot_know_and_always_the_same(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [tmp_path / name for name in ("a", "b")]
    for out in tables:
        assert main([str(trace), f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[0])
    assert tables[0].read_bytes() == tables[1].read_bytes()
    assert told["mae_tokens"] < told["history_mae_tokens"] / 3 and 0.75 <= told["p90_coverage"] <= 1
    table = read_table(tables[0].read_bytes())
    asked = inputs_of(np.array([BRIEF, 0, 0], np.uint64), log_of(np.array([640, 640, 40])), np.array([-1, -1, -1]))
    brief, long, short = length_of(table.p50.predict(asked)).tolist()
    assert 12 <= brief <= 21 and 500 <= long <= 800 and 30 <= short <= 50


def test_integers_say_what_the_model_says(trace: Path) -> None:
    from sklearn.ensemble import GradientBoostingRegressor

    samples = read_samples(trace)
    table, told = train(samples)
    assert told["trained_on"] == 320
    history = np.where(samples.history >= 0, log_of(samples.history), -1)
    x = inputs_of(samples.features, log_of(samples.prompt_tokens), history)
    model = GradientBoostingRegressor(
        loss="quantile", alpha=0.5, n_estimators=60, max_depth=3, learning_rate=0.1, min_samples_leaf=5, random_state=0
    ).fit(x[:320], 64 * log_of(samples.generated_tokens)[:320])
    assert np.abs(model.predict(x) / 64 - table.p50.predict(x)).max() <= 1.5


def test_a_log_tells_each_answer_once(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, 1 << 20)
    for step in range(1, 4):
        ended = [
            {"id": n, "prompt_tokens": 9, "generated_tokens": 10 * n, "predicted_p50": n, "features": 7, "outcome": 1}
            for n in range(1, step + 2)  # told until a snapshot that told it was answered
        ]
        ended.append({"id": 50, "prompt_tokens": 9, "generated_tokens": 3, "outcome": Outcome.ABORTED})
        snapshot = Snapshot(incarnation=4, step=step, ended=rows_of(EndedTable, ended))
        writer.append(encode_snapshot(snapshot), encode_decision(Decision(step=step)), 100)
    writer.close()
    samples = read_samples(tmp_path)
    assert samples.generated_tokens.tolist() == [10, 20, 30, 40]
    assert samples.history.tolist() == [1, 2, 3, 4] and samples.features.tolist() == [7] * 4


def test_what_it_cannot_do_is_one_sentence(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few, strange, broken = tmp_path / "few.csv", tmp_path / "strange.csv", tmp_path / "broken.csv"
    few.write_text("prompt_len,output_len\n" + "3,4\n" * 5)
    strange.write_text("a,b\n1,2\n")
    broken.write_text("prompt_len,output_len\n3,4\n3,many\n")
    monkeypatch.chdir(tmp_path)
    for source, said in (
        (few, "5 answers are too few"),
        (strange, "has none of the columns"),
        (broken, "line 3: not a number"),
        (tmp_path / "nothing", "there is no log or trace"),
    ):
        assert main([str(source), "--out=x"]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    assert main([str(trace), "--out=x"]) == 2
    assert capsys.readouterr().err == "lengths: training needs scikit-learn: pip install 'jitney[train]'\n"
    assert not Path("x").exists()
