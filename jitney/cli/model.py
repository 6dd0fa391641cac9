"""`jitney model`: fetch a model, and say which one is served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from jitney import models
from jitney.cli import common

app = typer.Typer(no_args_is_help=True, help="Fetch models; show the one that is served.")


@app.command()
def fetch(
    name: Annotated[
        str, typer.Argument(help='"default" (SmolLM2-135M-Instruct, 93 MB) or ORG/NAME of a hub.')
    ] = "default",
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", help="Where models are kept. Default: ~/.cache/jitney.")
    ] = None,
) -> None:
    """Fetches a model unless it is there, and prints its path."""
    print(fetch_with_bar(name, cache_dir))


@app.command()
def show(
    as_json: common.AsJson = False,
    target: common.Target = common.TARGET,
    patience: common.Patience = common.PATIENCE_S,
    tls_ca: common.TlsCa = None,
) -> None:
    """Shows the model that an executor serves."""
    with common.client(target, patience, tls_ca) as client:
        info = dataclasses.asdict(client.model_info())
    info["fingerprint"] = info["fingerprint"].hex()
    if as_json:
        print(json.dumps(info))
        return
    for key, value in info.items():
        common.out().print(f"{key.replace('_', ' '):17} {value}")


def fetch_with_bar(name: str, cache_dir: Path | None = None) -> Path:
    """`models.fetch` with a progress bar on stderr (a line for each stage where that is no terminal)."""
    console = common.notes()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total or None)
                if not console.is_terminal:
                    console.print(f"model: {what}")
            bar.update(tasks[what], completed=done)

        return models.fetch(name, cache_dir, report)
