"""From a path to weights: which kind of file it is, its version, and the cache where reading is slow."""

from __future__ import annotations

from pathlib import Path

from executor_svc.model import weights_cache
from executor_svc.model.config import BadModel
from executor_svc.model.digest import combined_digest, file_digest
from executor_svc.model.gguf_file import Progress, is_gguf, read_gguf
from executor_svc.model.safetensors_file import read_directory, version_files
from executor_svc.model.weights import Weights, check_tensors


def no_progress(stage: str, fraction: float) -> None:
    """Tells nobody."""


def load_weights(path: Path, cache_dir: Path | None = None, progress: Progress = no_progress) -> Weights:
    """Loads a GGUF file, a Hugging Face directory, or a directory that holds one GGUF file.

    `cache_dir` None: nothing is cached. `progress` gets a stage and a fraction from 0 to 1. Raises BadModel, in one
    sentence.
    """
    source = _resolve(path)
    if source.is_dir():
        progress("reading the weights", 0.0)
        version = combined_digest(source, version_files(source), cache_dir)
        config, tensors = read_directory(source)
        check_tensors(str(source), config, tensors)
        return Weights(source.name, version, config, tensors)
    if not is_gguf(source):
        raise BadModel(f"{source} is no GGUF file, nor a directory with a model in it", field="model")
    progress("checking the model file", 0.0)
    version = file_digest(source, cache_dir)
    cached = weights_cache.load(cache_dir, version) if cache_dir is not None else None
    if cached is None:
        cached = read_gguf(source, progress)
        check_tensors(str(source), *cached)
        if cache_dir is not None and file_digest(source, cache_dir) == version:  # not changed while it was read
            progress("caching the weights", 0.95)
            weights_cache.store(cache_dir, version, *cached)
    return Weights(source.stem, version, *cached)


def _resolve(path: Path) -> Path:
    """The directory or file to read; the one GGUF file of a directory that has no config.json."""
    if not path.is_dir() or (path / "config.json").exists():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise BadModel(f"{path} holds {len(found)} GGUF files; name one of them", field="model", value=path)
    raise BadModel(f"{path} holds neither a config.json nor a GGUF file", field="model", value=path)
