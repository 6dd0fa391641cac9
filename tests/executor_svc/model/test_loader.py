"""Model files: both kinds hold the same weights, broken ones give one sentence, the cache is never believed blindly."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.model import loader, model, weights_cache
from executor_svc.model.config import BadModel
from executor_svc.model.linear import Linear
from executor_svc.model.loader import load_weights
from executor_svc.model.model import CpuModel
from executor_svc.model.probe import RowMultiple
from executor_svc.model.weights import Weights
from jitney.errors import InvalidRequest
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_llama import make_tiny_llama


def same(first: Weights, second: Weights) -> bool:
    """Whether all tensors are equal, bit by bit."""
    return first.tensors.keys() == second.tensors.keys() and all(
        torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items()
    )


def test_gguf_and_safetensors_hold_the_same(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    from_safetensors = load_weights(directory)
    from_gguf = load_weights(write_gguf(directory, tmp_path / "tiny.gguf"))
    assert same(from_safetensors, from_gguf)
    assert from_gguf.name == "tiny"
    assert from_safetensors.version != from_gguf.version


def test_shards_are_joined(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path)
    whole = load_weights(directory)
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, directory / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    assert same(whole, load_weights(directory))
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadModel, match=r"00002-of-00002\.safetensors is missing"):
        load_weights(directory)


def test_the_version_follows_weights_and_tokenizer(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    first = load_weights(directory, tmp_path / "cache").version
    assert load_weights(directory, tmp_path / "cache").version == first
    assert load_weights(directory).version == first
    (directory / "tokenizer_config.json").write_text("{}")
    second = load_weights(directory, tmp_path / "cache").version
    assert second != first
    make_tiny_llama(directory, seed=1)
    assert load_weights(directory, tmp_path / "cache").version not in (first, second)


def cut_in_half(path: Path) -> None:
    """Keeps the first half of a file."""
    os.truncate(path, path.stat().st_size // 2)


BREAKS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "truncated": cut_in_half,
    "empty": lambda path: path.write_bytes(b""),
    "foreign": lambda path: path.write_bytes(b"PK\x03\x04" + b"something else" * 1000),
    "header only": lambda path: os.truncate(path, 40),
}


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_broken_file_is_one_sentence(tmp_path: Path, kind: str, how: str) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    if kind == "gguf":
        path = broken = write_gguf(directory, tmp_path / "tiny.gguf")
    else:
        path, broken = directory, directory / "model.safetensors"
    BREAKS[how](broken)
    with pytest.raises(BadModel) as caught:
        load_weights(path, tmp_path / "cache")
    assert broken.name in caught.value.message
    assert "\n" not in caught.value.message
    assert not (tmp_path / "cache" / "weights").exists()


def test_a_path_that_holds_no_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"neither a config\.json nor a GGUF file"):
        load_weights(tmp_path)
    with pytest.raises(BadModel, match="is missing"):
        load_weights(tmp_path / "nothing")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(BadModel, match="holds 2 GGUF files"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 64)}), r"lm_head.weight is \(3, 64\)"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            "not a float type",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(1)}),
            "q_norm.weight is not part of the architecture llama",
        ),
        (lambda tensors: tensors.update({"lm_head.bias": torch.ones(512)}), "lm_head.bias is not part"),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.bias": torch.ones(128, dtype=torch.int32)}),
            "up_proj.bias is torch.int32",
        ),
    ],
)
def test_tensors_must_fit_the_configuration(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    directory = make_tiny_llama(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BadModel, match=words):
        load_weights(directory)


def test_a_second_load_reads_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "tiny.gguf")
    stages: list[str] = []
    first = load_weights(path, tmp_path / "cache", lambda stage, fraction: stages.append(stage))
    assert "dequantising the weights" in stages
    monkeypatch.setattr(loader, "read_gguf", None)
    second = load_weights(path, tmp_path / "cache")
    assert same(first, second)
    assert second.config == first.config
    assert not list((tmp_path / "cache").rglob("*.part"))


@pytest.mark.parametrize(
    "how", ["missing", "truncated", "empty", "foreign", "header only", "a flipped bit", "another config", "stale"]
)
def test_a_damaged_cache_is_written_anew(tmp_path: Path, how: str) -> None:
    cache = tmp_path / "cache"
    path = write_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "tiny.gguf")
    first = load_weights(path, cache)
    cached = weights_cache.cache_path(cache, first.version)
    intact = cached.read_bytes()
    if how == "a flipped bit":
        cached.write_bytes(intact[:-100] + bytes([intact[-100] ^ 4]) + intact[-99:])
    elif how == "another config":
        cached.write_bytes(intact.replace(b'heads\\": 4', b'heads\\": 2'))
        assert cached.read_bytes() != intact
    elif how == "stale":
        cached.write_bytes(intact.replace(weights_cache.FORMAT.encode(), b"jitney-weights-0"))
    else:
        BREAKS[how](cached)
    assert weights_cache.load(cache, first.version) is None
    assert same(first, load_weights(path, cache))
    assert weights_cache.load(cache, first.version) is not None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    path = write_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "tiny.gguf")
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert load_weights(path, tmp_path / "cache").config.layers == 2


def test_a_full_disk_is_no_error(tmp_path: Path) -> None:
    path = write_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "tiny.gguf")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # no file may grow over it
    try:
        assert load_weights(path, tmp_path / "cache").config.layers == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "cache" / "weights").iterdir())


def test_a_file_that_changes_while_it_is_read_is_not_cached(tmp_path: Path) -> None:
    path = write_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "tiny.gguf")
    other = write_gguf(make_tiny_llama(tmp_path / "other", seed=1), tmp_path / "other.gguf")

    def replace(stage: str, fraction: float) -> None:
        if stage == "reading the GGUF file":
            path.write_bytes(other.read_bytes())

    load_weights(path, tmp_path / "cache", replace)
    assert not (tmp_path / "cache" / "weights").exists()


def test_a_head_or_a_pool_that_cannot_be_had_is_one_sentence(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path, hidden=48)
    with pytest.raises(BadModel, match="head size 12 is not a multiple of 8"):
        CpuModel.load(directory, pool_blocks=4)
    with pytest.raises(InvalidRequest, match=r"--pool-blocks 1073741824 of .* do not fit into memory"):
        CpuModel.load(make_tiny_llama(tmp_path), pool_blocks=1 << 30, block_tokens=4096)


def test_no_step_is_probed_that_the_pool_cannot_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def note(layers: Sequence[tuple[Linear, int]], machine: str, cache_dir: Path | None) -> RowMultiple:
        asked.extend(rows for _, rows in layers)
        return RowMultiple(1, invariant=True)

    monkeypatch.setattr(model, "probe_cached", note)
    CpuModel.load(make_tiny_llama(tmp_path), pool_blocks=4, max_step_tokens=1 << 20, max_step_rows=8)
    assert max(asked) == 4 * 16 + 8
