"""`jitney demo`: thirty requests at once against services of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jitney.demo import run_and_exit


def demo(
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="GGUF file or model folder. Absent: the default model.")
    ] = None,
    schedulers: Annotated[int, typer.Option(min=1, max=16, help="How many schedulers.")] = 1,
) -> None:
    """Start the services, send thirty requests at once, show what happens, and stop."""
    run_and_exit(model, schedulers)
