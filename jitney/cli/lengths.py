"""`jitney lengths`: what answers of the past teach about the length of those to come."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jitney.cli.logs import run_program

app = typer.Typer(no_args_is_help=True, help="Predicted lengths of answers.")


@app.callback()
def group() -> None:
    """Keeps `train` a command of its own."""


@app.command()
def train(
    source: Annotated[Path, typer.Argument(help="A decision log (folder or segment), or a trace as CSV.")],
    out: Annotated[Path, typer.Option("--out", help="File that gets the table, for the executor's --length-table.")],
) -> None:
    """Learns lengths from a log or a trace, and writes them as a table of integers. Needs scikit-learn."""
    run_program("scheduler_svc.train_lengths", str(source), f"--out={out}")
