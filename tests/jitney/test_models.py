"""Fetching models: digests, truncated files, second calls, and a hub; all without a network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jitney import models
from jitney.errors import Away, Conflict, InvalidRequest, JitneyError
from tests.support.hub_server import hub_server

CONTENT = bytes(range(256)) * 4096


def a_model(content: bytes = CONTENT, version: str = "1.0") -> models.PackagedModel:
    """A packaged model that no index knows."""
    return models.PackagedModel(
        name="Tiny",
        requirement=f"jitney-no-such-model=={version}",
        wheel_bytes=len(content),
        member="jitney_no_such_model/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        file_bytes=len(content),
    )


def a_wheel(folder: Path, content: bytes = CONTENT, version: str = "1.0") -> Path:
    """A wheel of that model."""
    info = f"jitney_no_such_model-{version}.dist-info"
    wheel = folder / f"jitney_no_such_model-{version}-py3-none-any.whl"
    members = {
        "jitney_no_such_model/tiny.gguf": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: jitney-no-such-model\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in members) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in {**members, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return wheel


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip may look."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def fetch(tmp_path: Path, model: models.PackagedModel) -> tuple[Path, list[str]]:
    """The path, and what was done for it."""
    steps: list[str] = []
    path = models.fetch_packaged(model, tmp_path / "cache", lambda what, done, total: steps.append(what))
    return path, list(dict.fromkeys(steps))


def test_fetches_checks_and_remembers(tmp_path: Path, wheels: Path) -> None:
    a_wheel(wheels)
    path, steps = fetch(tmp_path, a_model())
    assert path == tmp_path / "cache" / "models" / "Tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert steps == ["downloading", "unpacking"]
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert fetch(tmp_path, a_model()) == (path, [])
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "tiny.gguf", "tiny.gguf.checked.json"]


@pytest.mark.parametrize("damage", [b"", CONTENT[: len(CONTENT) // 2], CONTENT[:-1] + b"x"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, wheels: Path, damage: bytes) -> None:
    a_wheel(wheels)
    path, _ = fetch(tmp_path, a_model())
    os.utime(path, ns=(1, 1))
    path.write_bytes(damage)
    again, steps = fetch(tmp_path, a_model())
    assert again.read_bytes() == CONTENT
    assert "downloading" in steps
    assert fetch(tmp_path, a_model())[1] == []


def test_a_file_that_was_copied_there_is_checked_once(tmp_path: Path, wheels: Path) -> None:
    target = models.default_model_path(tmp_path / "cache", a_model())
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT)
    assert fetch(tmp_path, a_model()) == (target, ["checking"])
    assert fetch(tmp_path, a_model()) == (target, [])


def test_another_content_is_refused_and_not_left_behind(tmp_path: Path, wheels: Path) -> None:
    a_wheel(wheels, content=CONTENT + b"more")
    with pytest.raises(Conflict) as caught:
        fetch(tmp_path, a_model())
    assert caught.value.field == "sha256"
    assert caught.value.limit == a_model().sha256
    assert [p.name for p in (tmp_path / "cache" / "models" / "Tiny").iterdir()] == [".lock"]


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, wheels: Path) -> None:
    a_wheel(wheels)
    model = dataclasses.replace(a_model(), member="jitney_no_such_model/other.gguf")
    with pytest.raises(Conflict, match="does not hold"):
        fetch(tmp_path, model)


def test_no_package_to_be_had_is_one_sentence(tmp_path: Path, wheels: Path) -> None:
    with pytest.raises(Away, match="pip could not download jitney-no-such-model") as caught:
        fetch(tmp_path, a_model())
    assert "\n" not in caught.value.message


def test_leftovers_of_a_killed_fetch_are_removed(tmp_path: Path, wheels: Path) -> None:
    a_wheel(wheels)
    leftover = tmp_path / "cache" / "models" / "Tiny" / ".fetch-old"
    leftover.mkdir(parents=True)
    (leftover / "part.gguf").write_bytes(b"half")
    fetch(tmp_path, a_model())
    assert not leftover.exists()


def test_a_cache_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(Away, match="cannot store the model"):
        fetch(tmp_path, a_model())


def test_the_cache_folder_is_configured_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_CACHE_DIR", str(tmp_path))
    assert models.default_model_path().is_relative_to(tmp_path)
    monkeypatch.delenv("JITNEY_CACHE_DIR")
    assert models.default_model_path().is_relative_to(Path.home() / ".cache" / "jitney" / "models")


@pytest.mark.parametrize("spec", ["", "smollm", "a/b/c", "../x/y", "/etc", "org/", "org/..", "-x/y"])
def test_odd_names_are_refused(tmp_path: Path, spec: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        models.fetch(spec, tmp_path)
    assert caught.value.field == "model"


FETCH_FROM_HUB = """
import sys
from pathlib import Path
from jitney import models
from jitney.errors import JitneyError
try:
    print(models.fetch(sys.argv[1], Path(sys.argv[2])))
except JitneyError as error:
    print(type(error).__name__, error.message)
"""


def fetch_from_hub(endpoint: str, name: str, tmp_path: Path) -> str:
    """In a process of its own: huggingface_hub reads its endpoint when it is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", FETCH_FROM_HUB, name, str(tmp_path / "cache")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


LLAMA = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"not wanted",
}


def test_a_llama_model_comes_from_a_hub_once(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with hub_server({"org/tiny": LLAMA}) as endpoint:
        folder = Path(fetch_from_hub(endpoint, "org/tiny", tmp_path))
    assert folder == tmp_path / "cache" / "models" / "org" / "tiny"
    assert (folder / "model.safetensors").read_bytes() == LLAMA["model.safetensors"]
    assert not (folder / "pytorch_model.bin").exists()
    assert models.fetch("org/tiny", tmp_path / "cache") == folder


def test_a_hub_model_with_a_truncated_file_is_not_taken_for_whole(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with hub_server({"org/tiny": LLAMA}) as endpoint:
        folder = Path(fetch_from_hub(endpoint, "org/tiny", tmp_path))
        (folder / "model.safetensors").write_bytes(b"half")
        assert fetch_from_hub(endpoint, "org/tiny", tmp_path) == str(folder)
    assert (folder / "model.safetensors").read_bytes() == LLAMA["model.safetensors"]


def test_what_a_hub_cannot_give_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    other = {**LLAMA, "config.json": json.dumps({"model_type": "mamba"}).encode()}
    bare = {"config.json": LLAMA["config.json"]}
    with hub_server({"org/other": other, "org/bare": bare}) as endpoint:
        said = {name: fetch_from_hub(endpoint, name, tmp_path) for name in ("org/other", "org/bare", "org/none")}
    assert said["org/other"] == 'InvalidRequest org/other is of the family "mamba"; Jitney runs "llama" models'
    assert said["org/bare"] == "InvalidRequest org/bare has no safetensors files"
    assert said["org/none"].startswith("Away the hub has no model org/none")
    gone = fetch_from_hub(endpoint, "org/other2", tmp_path)
    assert gone.startswith("Away cannot fetch org/other2 from the hub")
    assert "\n" not in gone


def test_a_missing_hub_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(JitneyError, match=r"needs the package huggingface_hub: pip install 'jitney\[hub\]'"):
        models.fetch("org/tiny", tmp_path)
