"""A policy of one's own: loaded, listed, decided with, and refused when it is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitney.errors import InvalidRequest
from jitney.serving.config import load
from jitney.snapshot import Blocks, PolicyChoice, Settings, Snapshot
from scheduler_svc.build import BUILD
from scheduler_svc.config import SERVICE, SchedulerConfig
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.policies.custom import with_custom
from tests.support.situations import running, waiting

ROOT = Path(__file__).parents[2]


def documented(folder: Path) -> Path:
    """The policy that the documentation shows, as a file."""
    text = (ROOT / "docs" / "policies.md").read_text()
    source = text.split("```python\n", 1)[1].split("```", 1)[0]
    assert len(source.splitlines()) <= 40
    path = folder / "shortest_prompt.py"
    path.write_text(source)
    return path


def test_the_documented_policy_decides(tmp_path: Path) -> None:
    book = with_custom(f"{documented(tmp_path)}:ShortestPrompt")
    assert [kind.name for kind in book.kinds] == sorted([*(kind.name for kind in BUILT_IN.kinds), "shortest_prompt"])
    assert book.build.startswith(f"{BUILD}+shortest_prompt.") and BUILT_IN.build == BUILD
    shown = Snapshot(
        policy=PolicyChoice("shortest_prompt", (("patience_us_per_token", 10),)),
        settings=Settings(max_rows=3),
        blocks=Blocks(99, 99),
        running=running({}),
        waiting=waiting({"tokens": 90}, {"tokens": 30}, {"tokens": 60, "arrival_us": 0}),
    )
    decision = decide(shown, book)
    assert decision.admit.id.tolist() == [102, 103] and decision.build == book.build
    assert "shortest_prompt: " in explain(shown, 101, book).sentence
    with pytest.raises(InvalidRequest):
        decide(shown)


def test_another_version_is_another_build(tmp_path: Path) -> None:
    path = documented(tmp_path)
    first = with_custom(f"{path}:ShortestPrompt").build
    path.write_text(path.read_text() + "\n# changed\n")
    assert with_custom(f"{path}:ShortestPrompt").build != first


@pytest.mark.parametrize(
    ("source", "spec", "says"),
    [
        ("", "nowhere.py:Mine", "names no file"),
        ("", "mine.py", "names no file"),
        ("x = 1\n", "mine.py:Mine", "has no policy 'Mine'"),
        ("class Mine: pass\n", "mine.py:Mine", "has no policy 'Mine'"),
        ("def broken(:\n", "mine.py:Mine", "cannot be loaded: SyntaxError"),
        ("import no_such_module\n", "mine.py:Mine", "cannot be loaded: ModuleNotFoundError"),
        ("from scheduler_svc.policies.base import Policy\nclass Mine(Policy): name = 'x'\n", "mine.py:Mine", "needs"),
        ("from scheduler_svc.policies.fcfs import Fcfs as Mine\n", "mine.py:Mine", "is named 'fcfs', as another one"),
    ],
)
def test_what_is_no_policy_is_refused(tmp_path: Path, source: str, spec: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(InvalidRequest) as error:
        with_custom(f"{tmp_path}/{spec}")
    assert says in error.value.message and error.value.field == "policy"
    with pytest.raises(InvalidRequest):
        load(SchedulerConfig, SERVICE, [f"--policy={tmp_path}/{spec}"], {})
