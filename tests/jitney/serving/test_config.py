"""Configuration: where settings come from, which one wins, and what is said of wrong ones."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from jitney.serving.config import ConfigError, ServingConfig, digest, load, load_or_exit, option, required, to_argv


class Kind(enum.StrEnum):
    FAST = "fast"
    EXACT = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ServingConfig):
    """A service for tests."""

    model: Path = required("A model")
    max_rows: int = option(256, "Rows of a step", minimum=1, maximum=4096)
    ratio: float = option(0.5, "A share", minimum=0, maximum=1)
    kind: Kind = option(Kind.FAST, "How")
    mode: Literal["a", "b"] = option("a", "Which")
    targets: tuple[str, ...] = option((), "Addresses")
    sizes: tuple[int, ...] = option((1, 2), "Sizes", minimum=1)
    eager: bool = option(False, "Whether")
    limit: int | None = option(None, "A limit", minimum=2)


def test_flag_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "jitney.toml"
    file.write_text('model = "/m"\nmax_rows = 1\nratio = 0.25\nlog-level = "debug"\nsizes = [3, 4]\n')
    environ = {"JITNEY_TEST_CONFIG": str(file), "JITNEY_TEST_MAX_ROWS": "2", "JITNEY_TEST_RATIO": "0.75"}
    config = load(Config, "test", ["--max-rows", "3"], environ)
    assert (config.max_rows, config.ratio, config.log_level, config.sizes) == (3, 0.75, "debug", (3, 4))
    assert (config.model, config.grace_s, config.kind) == (Path("/m"), 30.0, Kind.FAST)


def test_types() -> None:
    argv = ["--model=/m", "--kind=exact", "--mode=b", "--targets=a:1, b:2", "--sizes=5", "--eager", "--limit=7"]
    config = load(Config, "test", [*argv, "--port-file=/p"], {})
    assert (config.kind, config.mode, config.targets, config.sizes) == (Kind.EXACT, "b", ("a:1", "b:2"), (5,))
    assert (config.eager, config.limit, config.port_file) == (True, 7, Path("/p"))
    assert load(Config, "test", ["--model=/m", "--eager=no"], {}).eager is False
    assert load(Config, "test", ["--model=/m"], {"JITNEY_TEST_LIMIT": ""}).limit is None


def test_second_variable_is_used_if_the_own_one_is_not_set() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}
    assert load(Config, "test", ["--model=/m"], environ).otlp_endpoint == "http://c:4317"
    environ["JITNEY_TEST_OTLP_ENDPOINT"] = "http://d:4317"
    assert load(Config, "test", ["--model=/m"], environ).otlp_endpoint == "http://d:4317"


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        ([], {}, "--model (or JITNEY_TEST_MODEL) must be set"),
        (["--model=/m", "--max-rows=0"], {}, "--max-rows must be at least 1, got 0"),
        (["--model=/m"], {"JITNEY_TEST_MAX_ROWS": "5000"}, "JITNEY_TEST_MAX_ROWS must be at most 4096, got 5000"),
        (["--model=/m", "--max-rows=many"], {}, "--max-rows must be a whole number, got 'many'"),
        (["--model=/m", "--max-rows=2.5"], {}, "--max-rows must be a whole number, got '2.5'"),
        (["--model=/m", "--ratio=nan"], {}, "--ratio must be a finite number, got 'nan'"),
        (["--model=/m", "--ratio=x"], {}, "--ratio must be a number, got 'x'"),
        (["--model=/m", "--mode=c"], {}, "--mode must be one of a, b, got 'c'"),
        (["--model=/m", "--kind=slow"], {}, "--kind must be one of fast, exact, got 'slow'"),
        (["--model=/m", "--eager=maybe"], {}, "--eager must be true or false, got 'maybe'"),
        (["--model=/m", "--sizes=1,0"], {}, "--sizes must be at least 1, got 0"),
        (["--model=/m", "--limit=1"], {}, "--limit must be at least 2, got 1"),
        (["--model=/m", "--port=70000"], {}, "--port must be at most 65535, got 70000"),
        (["--model=/m", "--tls-cert=/c"], {}, "--tls-cert and --tls-key belong together"),
        (["--model=/m", "--no-such"], {}, "unrecognized arguments: --no-such"),
        (["--model=/m", "--config=/no/such.toml"], {}, "/no/such.toml: cannot be read"),
    ],
)
def test_wrong_settings_are_named(argv: list[str], environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Config, "test", argv, environ)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_rowz = 3", "there is no setting 'max_rowz'"),
        ("max_rows = 2.5", "max_rows in"),
        ("max_rows = true", "max_rows in"),
        ("eager = 'perhaps'", "must be true or false"),
        ("sizes = 3", "must be a list"),
        ("= 3", "cannot be read"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(Config, "test", ["--model=/m", f"--config={file}"], {})
    assert says in caught.value.message


def test_digest_tells_configurations_apart() -> None:
    first, same = (load(Config, "test", ["--model=/m"], {}) for _ in range(2))
    other = load(Config, "test", ["--model=/m", "--max-rows=9"], {})
    assert digest(first) == digest(same) != digest(other)
    assert len(digest(first)) == 12


def test_a_configuration_can_be_written_as_flags() -> None:
    argv = ["--model=/m", "--kind=exact", "--sizes=4,5", "--eager", "--limit=7", "--ratio=0.125", "--targets=a:1,b:2"]
    config = load(Config, "test", argv, {})
    assert load(Config, "test", to_argv(config), {}) == config


def test_it_is_frozen() -> None:
    config = load(Config, "test", ["--model=/m"], {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_rows = 1  # type: ignore[misc]


def test_a_main_program_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_or_exit(Config, "test", ["--model=/m", "--max-rows=0"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "test: --max-rows must be at least 1, got 0\n"


def test_help_names_flag_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Config, "test", ["--help"], {})
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-rows V Rows of a step [256] (JITNEY_TEST_MAX_ROWS)" in text
