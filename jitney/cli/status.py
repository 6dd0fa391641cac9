"""`jitney status`: what runs, what waits and why."""

from __future__ import annotations

import dataclasses
import json

import typer
from rich.table import Table

from jitney.cli import common
from jitney.client import Status


def status(
    as_json: common.AsJson = False,
    target: common.Target = common.TARGET,
    patience: common.Patience = common.PATIENCE_S,
    tls_ca: common.TlsCa = None,
) -> None:
    """Shows an executor's state. Exit status 3 if it is not ready."""
    with common.client(target, patience, tls_ca) as client:
        found = client.status()
    if as_json:
        print(json.dumps(_plain(found)))
    else:
        common.out().print(_table(found))
    raise typer.Exit(3 if found.not_ready else 0)


def _plain(found: Status) -> dict[str, object]:
    plain = dataclasses.asdict(found)
    plain["finished"] = {reason.name.lower(): count for reason, count in found.finished.items()}
    return plain


def _table(found: Status) -> Table:
    table = Table(title=f"executor {found.executor}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(found):
        table.add_row(name, value)
    return table


def rows(found: Status) -> list[tuple[str, str]]:
    """Name and value of each line."""
    blocks = found.blocks
    parameters = " ".join(f"{key}={value}" for key, value in sorted(found.policy.parameters.items()))
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.waiting_reasons.items())
    ends = ", ".join(f"{count} {reason.name.lower()}" for reason, count in found.finished.items() if count)
    times = f" in {found.decide_us_p50 / 1000:.2f} ms (p99 {found.decide_us_p99 / 1000:.2f})" if found.decisions else ""
    return [
        ("ready", found.not_ready or "yes"),
        ("scheduler", f"{_link(found.scheduler_connected)} {found.scheduler_build}".strip()),
        ("cache", _link(found.cache_connected) + _times(found.cache_reopenings, ", opened again {} times")),
        ("attention", found.backend),
        ("policy", f"{found.policy.name} {parameters}".strip()),
        (
            "requests",
            f"{found.num_running} running, {found.num_waiting} waiting" + (f" ({reasons})" if reasons else ""),
        ),
        ("ended", ", ".join(part for part in (ends, _times(found.refused, "{} refused")) if part) or "none"),
        ("blocks", f"{blocks.free} free, {blocks.evictable} cached, {blocks.granted} granted, of {blocks.total}"),
        ("steps", f"{found.step}, {found.decisions} decisions{times}, {found.coasted_steps} coasted"),
        (
            "tokens",
            f"{found.prompt_tokens} prefilled, {found.cached_tokens} cached, {found.generated_tokens} generated",
        ),
        ("preemptions", str(found.preemptions)),
    ]


def _link(up: bool) -> str:
    return "connected" if up else "AWAY"


def _times(count: int, text: str) -> str:
    return text.format(count) if count else ""
