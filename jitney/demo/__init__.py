"""The demo: starts the services, sends thirty requests at once, shows the streams and a summary, stops the services.

The last line on stdout is JSON (see `Summary.line`). The exit status is 0 only if every answer arrived whole.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NoReturn

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from jitney.client import AsyncClient
from jitney.demo.board import board, draw
from jitney.demo.play import play, streams
from jitney.demo.prompts import asks
from jitney.demo.summary import Summary, show, summarise
from jitney.errors import JitneyError
from jitney.models import fetch
from jitney.service_process import Progress
from jitney.supervisor import ServeOptions, Supervisor

HISTORY_STEPS: Final = 65_536
GRACE_S: Final = 5.0


def run_and_exit(model: Path | None = None, schedulers: int = 1, picture: Path | None = None) -> NoReturn:
    """Runs the demo; errors are one line on stderr. `picture`: an SVG of what was shown."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
    try:
        found = run(console, model, schedulers, picture)
    except JitneyError as error:
        print(f"jitney demo: {error.message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    print(found.line(), flush=True)
    sys.exit(0 if found.whole else 1)


def run(console: Console, model: Path | None, schedulers: int, picture: Path | None) -> Summary:
    """Starts the services, plays, stops them. Raises JitneyError; the log of the services is kept then."""
    path = model or fetch()
    folder = Path(tempfile.mkdtemp(prefix="jitney-demo-"))
    options = ServeOptions(
        state_dir=folder, schedulers=schedulers, grace_s=GRACE_S, executor_args=(f"--model={path}",)
    )  # fmt: skip
    supervisor = Supervisor(options)
    began = time.monotonic()
    try:
        _start(supervisor, console)
        console.print(f"{', '.join(supervisor.pids)} are up after {time.monotonic() - began:.1f} s; thirty requests:")
        found = asyncio.run(_play(console, supervisor.executor_target, picture))
        supervisor.stop()
    except BaseException:
        supervisor.stop(at_once=True)
        console.print(f"the log of the services: {supervisor.log_path}")
        raise
    if found.whole:
        shutil.rmtree(folder)
    else:
        console.print(f"the log of the services: {supervisor.log_path}")
    return found


def _start(supervisor: Supervisor, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting the services", total=1.0)

        def loading(progress: Progress) -> None:
            bar.update(task, description=progress.stage, completed=progress.fraction)

        supervisor.start(loading)


async def _play(console: Console, target: str, picture: Path | None) -> Summary:
    async with AsyncClient(target) as client:
        info, before = await client.model_info(), await client.status()
        todo = asks()
        all_streams = streams(todo)
        async with board(console, all_streams) as changed:
            await play(target, todo, all_streams, changed)
        after = await client.status(HISTORY_STEPS)
    found = summarise(all_streams, before, after, info.block_tokens)
    show(console, found)
    if picture is not None:
        draw(picture, all_streams, found)
    return found
