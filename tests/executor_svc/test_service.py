"""The executor as a process: its settings, and how it refuses to start."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.limits import Limits
from executor_svc.service import load_model
from jitney.errors import JitneyError
from jitney.presets import PRESETS
from jitney.scheduler_codec import digest_of
from jitney.service_process import ServiceProcess
from jitney.serving.config import ConfigError, load
from jitney.snapshot import Batching, HorizonKind, PolicyChoice
from tests.support.processes import wait_until
from tests.support.tiny_llama import make_tiny_llama


def configured(*argv: str) -> ExecutorConfig:
    return load(ExecutorConfig, "executor", argv, {})


def test_the_defaults_are_whole() -> None:
    config = configured()
    settings = config.settings(8192)
    assert (settings.max_rows, settings.max_step_tokens, settings.block_tokens) == (64, 0, 16)  # 0: measured
    assert config.policy_choice() == PolicyChoice("fcfs")
    assert config.limits() == Limits()
    assert config.cached_price_ppm == 20_000


def test_settings_reach_their_places() -> None:
    config = configured(
        "--policy=edf",
        "--policy-parameters=b=2,a=-1",
        "--schedulers=h:1,h:2",
        "--max-waiting-requests=7",
        "--max-message-bytes=100000",
        "--reader-timeout-s=1.5",
        "--cached-price=0.5",
    )
    assert config.policy_choice() == PolicyChoice("edf", (("a", -1), ("b", 2)))
    assert config.schedulers == ("h:1", "h:2")
    assert config.settings(100).max_waiting_requests == 7
    assert (config.limits().request_bytes, config.limits().reader_timeout_s) == (100_000, 1.5)
    assert config.cached_price_ppm == 500_000


def test_how_rows_board_and_how_long_a_decision_holds() -> None:
    assert configured().settings(100).batching is Batching.CONTINUOUS
    config = configured(
        "--batching=static_padded", "--horizon=until_event", "--horizon-steps=5", "--target-tpot-ms=2.5"
    )
    settings = config.settings(100)
    assert (settings.batching, settings.horizon_kind) == (Batching.STATIC_PADDED, HorizonKind.UNTIL_EVENT)
    assert (settings.horizon_steps, settings.target_tpot_us) == (5, 2500)


def test_a_preset_goes_for_what_is_left_at_its_default() -> None:
    for name, values in PRESETS.items():
        config = configured(f"--preset={name}")
        assert {key: getattr(config, key) for key in values} == values
    config = configured("--preset=interactive", "--max-rows=20", "--target-tpot-ms=70")
    assert (config.max_rows, config.target_tpot_ms, config.max_step_tokens) == (20, 70, 128)
    with pytest.raises(ConfigError) as error:
        configured("--preset=batch", "--max-step-tokens=100")
    assert (error.value.field, error.value.limit, error.value.value) == ("max_rows", "100", "256")


def test_a_learned_table_goes_with_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(b"integers")
    (table,) = configured(f"--length-table={path}").policy_choice().tables
    assert (table.name, table.content, table.digest) == ("lengths", b"integers", digest_of(b"integers"))


@pytest.mark.parametrize(
    "argument, field",
    [
        ("--preset=fast", "--preset"),
        ("--length-table=/nowhere/table", "length_table"),
        ("--max-rows=0", "max_rows"),
        ("--max-rows=4097", "max_rows"),
        ("--name=", "name"),
        ("--name=a\x07", "name"),
        ("--schedulers=", "schedulers"),
        ("--policy-parameters=a", "policy_parameters"),
        ("--policy-parameters=a=x", "policy_parameters"),
        ("--cached-price=1.5", "cached_price"),
        ("--pool-blocks=1", "pool_blocks"),
        ("--arithmetic=int4", "--arithmetic"),
        ("--emulated", "emulated"),
    ],
)
def test_wrong_settings_are_refused(argument: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(argument)
    assert caught.value.field == field


def no_file(folder: Path) -> Path:
    return folder / "absent.gguf"


def empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def zip_file(folder: Path) -> Path:
    (folder / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    return folder / "x.gguf"


def truncated_gguf(folder: Path) -> Path:
    (folder / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 10, 10))
    return folder / "x.gguf"


def truncated_weights(folder: Path) -> Path:
    model = make_tiny_llama(folder / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return model


def small_model_with_a_large_tokenizer(folder: Path) -> Path:
    model, other = make_tiny_llama(folder / "model"), make_tiny_llama(folder / "other", vocab=600)
    (model / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    return model


def another_architecture(folder: Path) -> Path:
    model = make_tiny_llama(folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    return model


BROKEN: list[tuple[Callable[[Path], Path], str]] = [  # how it is made, and what the sentence names
    (no_file, "absent.gguf"),
    (empty_folder, "empty"),
    (zip_file, "x.gguf"),
    (truncated_gguf, "x.gguf"),
    (truncated_weights, "model.safetensors"),
    (small_model_with_a_large_tokenizer, "600 tokens, the model 512"),
    (another_architecture, "MambaForCausalLM"),
]


@pytest.mark.parametrize("make, what", BROKEN)
def test_a_broken_model_is_refused_with_one_sentence(tmp_path: Path, make: Callable[[Path], Path], what: str) -> None:
    config = configured(f"--model={make(tmp_path)}", f"--cache-dir={tmp_path}", "--pool-blocks=8")
    with pytest.raises(JitneyError, match=what) as caught:
        load_model(config)
    assert "\n" not in caught.value.message


def test_a_default_model_that_was_not_fetched_is_said(tmp_path: Path) -> None:
    with pytest.raises(JitneyError, match="jitney model fetch"):
        load_model(configured(f"--cache-dir={tmp_path}"))


def test_a_start_that_fails_is_one_line_and_a_status(tmp_path: Path) -> None:
    arguments = (f"--model={zip_file(tmp_path)}", f"--cache-dir={tmp_path}", "--pool-blocks=8")
    process = ServiceProcess("executor", "executor_svc", arguments, tmp_path)
    process.start()
    try:
        wait_until(lambda: process.exit_status() is not None, 120)
        errors = [record for record in process.said() if record.get("level") == "error"]
        assert process.exit_status() == 1, process.last_words()
        assert len(errors) == 1 and "exception" not in errors[0]
        assert "x.gguf is no GGUF file" in errors[0]["error"]
    finally:
        process.end(0)
