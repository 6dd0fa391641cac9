"""What is chosen out of measured times, and that it is kept."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from executor_svc.model import calibration
from executor_svc.model.calibration import best_tokens, calibrate, calibrate_cached, fewest_near, read_kept
from executor_svc.model.model import CpuModel
from tests.support.tiny_llama import make_tiny_llama


class PlayedTimes:
    """A machine: seconds of a step by threads and tokens."""

    def __init__(self, cores: int, fixed_s: float = 0.01, token_s: float = 0.001, most_tokens: int = 4096) -> None:
        self.cores, self.fixed_s, self.token_s, self.most_tokens = cores, fixed_s, token_s, most_tokens
        self.asked: list[int] = []
        self.jitter: Iterator[float] = itertools.repeat(1.0)

    def decode(self, threads: int) -> float:
        """Gains by threads up to so many cores, and loses by more."""
        return next(self.jitter) * (1.0 / min(threads, self.cores) + 0.1 * max(0, threads - self.cores))

    def prefill(self, tokens: int, threads: int) -> float:
        self.asked.append(threads)
        return self.fixed_s + self.token_s * tokens


@pytest.mark.parametrize(
    ("cores", "useful", "threads"), [(1, 1, 1), (2, 2, 2), (8, 8, 8), (8, 6, 6), (8, 1, 1), (64, 2, 2)]
)
def test_threads_are_the_fewest_that_are_fast(cores: int, useful: int, threads: int) -> None:
    times = PlayedTimes(useful)
    found, steady = calibrate(times, cores)
    assert found.threads == threads and steady
    assert set(times.asked) == {threads}
    assert cores in found.decode_s and 1 in found.decode_s


def test_tokens_are_the_fewest_that_use_the_machine_well() -> None:
    assert best_tokens({32: 0.02, 64: 0.03, 128: 0.06, 256: 0.12}) == 64
    assert best_tokens({32: 0.1, 64: 0.1, 128: 0.1, 256: 0.1, 512: 0.3}) == 256  # the last takes too long
    assert best_tokens({32: 7.0}) == 32
    assert fewest_near({1: 0.0, 2: 0.0}, {1: 98.0, 2: 100.0}) == 1
    assert fewest_near({1: 0.0, 2: 0.0}, {1: 97.0, 2: 100.0}) == 2


def test_it_ends_with_the_first_step_that_takes_too_long() -> None:
    found, _ = calibrate(PlayedTimes(1, fixed_s=9.0), 1)
    assert list(found.prefill_s) == [32] and found.prompt_tokens == 32
    found, _ = calibrate(PlayedTimes(1, fixed_s=0.0, token_s=1e-9), 1)
    assert max(found.prefill_s) == calibration.MOST_TOKENS
    found, _ = calibrate(PlayedTimes(1, most_tokens=100), 1)
    assert list(found.prefill_s) == [32, 64]
    found, _ = calibrate(PlayedTimes(1, most_tokens=8), 1)
    assert not found.prefill_s and found.prompt_tokens == calibration.LEAST_TOKENS


def test_uneven_tries_say_so() -> None:
    times = PlayedTimes(1)
    times.jitter = itertools.cycle((1.0, 1.6, 1.6))
    _, steady = calibrate(times, 1)
    assert not steady


@pytest.mark.parametrize("others_s", [0.0, 1000.0, math.nan])
def test_beside_other_processes_all_cores_are_taken_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_s: float
) -> None:
    counted = itertools.count()
    monkeypatch.setattr(calibration, "_others_s", lambda: others_s * next(counted))
    monkeypatch.setattr(calibration, "StepTimes", lambda model: PlayedTimes(1))
    model = CpuModel.load(make_tiny_llama(tmp_path / "model"), pool_blocks=8, block_tokens=4)
    found = calibrate_cached(model, 2, tmp_path)
    kept = (tmp_path / "calibrations").exists()
    assert (found.threads, kept) == ((1, True) if others_s == 0.0 else (2, False))


@pytest.mark.parametrize(("pool_blocks", "block_tokens"), [(2, 4), (64, 16), (3, 256)])
def test_kept_for_the_same_model_and_machine(tmp_path: Path, pool_blocks: int, block_tokens: int) -> None:
    threads = torch.get_num_threads()
    model = CpuModel.load(
        make_tiny_llama(tmp_path / "model"), pool_blocks=pool_blocks, block_tokens=block_tokens, cache_dir=tmp_path
    )
    first = calibrate_cached(model, 2, tmp_path)
    assert torch.get_num_threads() == threads
    assert 1 <= first.threads <= 2 and first.prompt_tokens >= 32
    files = list((tmp_path / "calibrations").glob("*.json"))
    for file in files:  # none where tries differed: the machine was busy
        entry = json.loads(file.read_text())
        file.write_text(json.dumps({**entry, "prompt_tokens": 777}))
    second = calibrate_cached(model, 2, tmp_path)
    assert (second.prompt_tokens == 777) == bool(files)
    for file in files:
        file.write_text("torn")
    assert calibrate_cached(model, 2, tmp_path).prompt_tokens != 777
    assert calibrate_cached(model, 1, tmp_path).threads == 1  # other cores: measured anew


KEPT = {"key": "k", "threads": 2, "prompt_tokens": 64, "decode_s": {"1": 0.1, "2": 0.2}, "prefill_s": {"32": 0.1}}


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 0},
        {"threads": 3},
        {"threads": -1},
        {"threads": math.inf},
        {"threads": None},
        {"prompt_tokens": -64},
        {"prompt_tokens": 10**9},
        {"decode_s": [1]},
        {"prefill_s": {"x": 1}},
        {"key": "other"},
    ],
)
def test_what_was_never_measured_here_is_not_believed(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "kept.json"
    file.write_text(json.dumps(KEPT))
    assert read_kept(file, "k", 2) is not None
    file.write_text(json.dumps({**KEPT, **change}))
    assert read_kept(file, "k", 2) is None


@pytest.mark.parametrize("content", ["", "{", "[1]", "7", "[" * 100000])
def test_a_torn_file_is_not_believed(tmp_path: Path, content: str) -> None:
    (tmp_path / "kept.json").write_text(content)
    assert read_kept(tmp_path / "kept.json", "k", 2) is None
    assert read_kept(tmp_path / "none.json", "k", 2) is None
