"""Configuration of a service: one frozen data class, read once from a file, the environment and flags.

A field `max_rows: int = option(256, "Rows of one step", minimum=1)` of the service "executor" is the flag
`--max-rows`, the variable `JITNEY_EXECUTOR_MAX_ROWS` and the key `max_rows` (or `max-rows`) of the TOML file named by
`--config` or `JITNEY_EXECUTOR_CONFIG`. A flag goes before a variable, a variable before the file, the file before the
default. Nothing but this module reads the environment.

Types: int, float, str, bool, Path, a Literal or StrEnum of strings, `T | None`, and `tuple[T, ...]` (comma separated).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import math
import os
import sys
import tempfile
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, Self, TypeVar

from jitney.errors import InvalidRequest, JitneyError

C = TypeVar("C", bound="ServingConfig")


SHARED: Final = {"JITNEY_CACHE_DIR", "JITNEY_STATE_DIR"}  # Of no service.


class ConfigError(InvalidRequest):
    """A setting is wrong. The message is one sentence that names the setting, where it came from and the limit."""


def option(
    default: Any,
    text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    env: str = "",
) -> Any:
    """A field of a config class. `env` is a second variable, read if the service's own one is not set."""
    metadata = {"help": text, "minimum": minimum, "maximum": maximum, "env": env}
    return dataclasses.field(default=default, metadata=metadata)


def required(text: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A field that has no default."""
    return dataclasses.field(metadata={"help": text, "minimum": minimum, "maximum": maximum, "env": ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """What each of the services has; their own config classes extend it."""

    host: str = option("127.0.0.1", "Address to listen on")
    port: int = option(0, "Port to listen on; 0 picks a free one", minimum=0, maximum=65535)
    port_file: Path | None = option(None, "File that gets the port once the service listens")
    grace_s: float = option(30.0, "Seconds that running calls get after SIGTERM", minimum=0, maximum=86400)
    max_message_bytes: int = option(64 << 20, "Largest message, both ways", minimum=1 << 16, maximum=1 << 30)
    max_connection_age_s: float = option(
        0.0, "Seconds after which a connection is renewed; 0: never", minimum=0, maximum=1e6
    )
    tls_cert: Path | None = option(None, "PEM file with the certificate chain; turns TLS on")
    tls_key: Path | None = option(None, "PEM file with the private key")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least level that is logged")
    log_format: Literal["auto", "json", "console"] = option("auto", "auto: console on a terminal, else json")
    otlp_endpoint: str = option(
        "", "OTLP/gRPC endpoint of a trace collector; empty: no traces", env="OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    trace_ratio: float = option(1.0, "Share of requests and steps that are traced", minimum=0, maximum=1)

    def settled(self) -> Self:
        """With settings that follow from others filled in; extended by the services."""
        return self

    def validate(self) -> None:
        """Checks of more than one field; extended by the services. Raises ConfigError."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: one of them is not set", field="tls_key")


def load(config_class: type[C], service: str, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> C:
    """Reads, checks and freezes the configuration of `service`. Raises ConfigError; `--help` prints and exits."""
    variables = os.environ if environ is None else environ
    prefix = f"JITNEY_{service.upper().replace('-', '_')}_"
    fields = dataclasses.fields(config_class)
    hints = typing.get_type_hints(config_class)
    flags = _parse(config_class, service, prefix, argv)

    path = flags.pop("config", None) or variables.get(f"{prefix}CONFIG")
    found: dict[str, tuple[object, str]] = {}
    if path:
        names = {field.name for field in fields}
        for key, value in _read_file(Path(path)).items():
            name = key.replace("-", "_")
            if name not in names:
                raise ConfigError(f"{path}: there is no setting {key!r}", field=name)
            found[name] = (value, f"{key} in {path}")
    for field in fields:
        for variable in (field.metadata.get("env", ""), prefix + field.name.upper()):
            if variable and variables.get(variable, "") != "":
                found[field.name] = (variables[variable], variable)
        if field.name in flags:
            found[field.name] = (flags[field.name], _flag(field.name))

    values: dict[str, Any] = {}
    for field in fields:
        if field.name in found:
            raw, source = found[field.name]
            values[field.name] = _convert(raw, hints[field.name], source)
            _check(field, values[field.name], source)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_flag(field.name)} (or {prefix}{field.name.upper()}) must be set", field=field.name)
    config = config_class(**values).settled()
    config.validate()
    return config


def load_or_exit(config_class: type[C], service: str, argv: Sequence[str] | None = None) -> C:
    """`load` for a main program: a wrong setting is one line on stderr and exit status 2."""
    try:
        return load(config_class, service, sys.argv[1:] if argv is None else argv)
    except JitneyError as error:
        _exit(f"{service}: {error.message}")


def unknown_variables(config_class: type[ServingConfig], service: str) -> list[str]:
    """Variables that carry this service's prefix and name no setting: most likely misspelt."""
    prefix = f"JITNEY_{service.upper().replace('-', '_')}_"
    known = {prefix + field.name.upper() for field in dataclasses.fields(config_class)} | {f"{prefix}CONFIG"} | SHARED
    return sorted(name for name in os.environ if name.startswith(prefix) and name not in known)


def environment() -> dict[str, str]:
    """A copy of the environment, for child processes."""
    return dict(os.environ)


def cache_dir() -> Path:
    """Where models and what was made of them are kept: JITNEY_CACHE_DIR, else ~/.cache/jitney."""
    return Path(os.environ.get("JITNEY_CACHE_DIR") or Path.home() / ".cache" / "jitney")


def default_shared_dir() -> Path:
    """What executor and cache of one user share on this machine: in shared memory where there is one."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"jitney-{os.getuid()}"


def state_dir() -> Path:
    """Where `jitney serve` keeps lock and log: JITNEY_STATE_DIR, else ~/.local/state/jitney."""
    return Path(os.environ.get("JITNEY_STATE_DIR") or Path.home() / ".local" / "state" / "jitney")


def describe(config: ServingConfig) -> dict[str, str]:
    """Every setting as text, in the order of the class."""
    return {field.name: _show(getattr(config, field.name)) for field in dataclasses.fields(config)}


def digest(config: ServingConfig) -> str:
    """Twelve hex digits that two equal configurations share."""
    text = "".join(f"{name}={value}\n" for name, value in sorted(describe(config).items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def to_argv(config: ServingConfig) -> list[str]:
    """Flags that give this configuration again: every setting that is not the default."""
    argv: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default or value is None:
            continue
        argv.append(f"{_flag(field.name)}={_show(value)}")
    return argv


def _exit(message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(2)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse(config_class: type[ServingConfig], service: str, prefix: str, argv: Sequence[str]) -> dict[str, Any]:
    """Flags that were given, as text."""
    parser = _Parser(prog=f"python -m {service}_svc", description=config_class.__doc__, allow_abbrev=False)
    parser.add_argument("--config", default=argparse.SUPPRESS, metavar="FILE", help="TOML file with settings")
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        default = "" if field.default is dataclasses.MISSING else f" [{_show(field.default)}]"
        text = f"{field.metadata.get('help', '')}{default} ({prefix}{field.name.upper()})".replace("%", "%%")
        extra: dict[str, Any] = {"nargs": "?", "const": "true"} if hints[field.name] is bool else {}
        parser.add_argument(
            _flag(field.name), dest=field.name, default=argparse.SUPPRESS, metavar="V", help=text, **extra
        )
    return vars(parser.parse_args(list(argv)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _read_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="config") from error


def _show(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(_show(part) for part in value)
    return value.value if isinstance(value, enum.StrEnum) else str(value)


def _convert(raw: object, kind: Any, source: str) -> Any:
    """`raw` (text of a flag or variable, or a TOML value) as the type of the field."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(kind) if part is not type(None)]
        return None if raw == "" else _convert(raw, inner[0], source)
    if typing.get_origin(kind) is tuple:
        parts = [part.strip() for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw
        if not isinstance(parts, list):
            raise _wrong(source, "a list", raw)
        return tuple(_convert(part, typing.get_args(kind)[0], source) for part in parts)
    if typing.get_origin(kind) is Literal:
        choices = [str(choice) for choice in typing.get_args(kind)]
        if raw not in choices:
            raise _wrong(source, "one of " + ", ".join(choices), raw)
        return raw
    return _convert_plain(raw, kind, source)


def _convert_plain(raw: object, kind: Any, source: str) -> Any:
    text = str(raw).strip()
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise _wrong(source, "true or false", raw)
    if isinstance(raw, (dict, list)) or (isinstance(raw, bool) and kind is not str):
        raise _wrong(source, f"of type {kind.__name__}", raw)
    if kind is int and isinstance(raw, float):
        raise _wrong(source, "a whole number", raw)
    try:
        value = kind(text)
    except ValueError as error:
        names = {int: "a whole number", float: "a number"}
        choices = ", ".join(kind) if isinstance(kind, type) and issubclass(kind, enum.StrEnum) else ""
        raise _wrong(source, f"one of {choices}" if choices else names.get(kind, kind.__name__), raw) from error
    if kind is float and not math.isfinite(value):
        raise _wrong(source, "a finite number", raw)
    return value


def _check(field: dataclasses.Field[Any], value: Any, source: str) -> None:
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    for part in value if isinstance(value, tuple) else (value,):
        if low is not None and part is not None and part < low:
            raise ConfigError(f"{source} must be at least {low}, got {part}", field=field.name, limit=low, value=part)
        if high is not None and part is not None and part > high:
            raise ConfigError(f"{source} must be at most {high}, got {part}", field=field.name, limit=high, value=part)


def _wrong(source: str, wanted: str, raw: object) -> ConfigError:
    return ConfigError(f"{source} must be {wanted}, got {str(raw)!r}", field=source, limit=wanted, value=raw)
