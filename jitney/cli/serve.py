"""`jitney serve`: the three services on this machine, until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from jitney.cli.common import notes
from jitney.cli.model import fetch_with_bar
from jitney.client import DEFAULT_TARGET
from jitney.errors import InvalidRequest
from jitney.service_process import Progress
from jitney.serving import config, logs
from jitney.supervisor import ServeOptions, Supervisor

Extra = list[str]


def serve(
    model: Annotated[
        str, typer.Option("--model", "-m", help="GGUF file or model folder. Absent: the default model, fetched once.")
    ] = "",
    schedulers: Annotated[int, typer.Option(min=1, max=16, help="How many schedulers.")] = 1,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the executor; 0 picks a free one.")] = 50051,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of lock and log; one jitney serve each.",
            show_default="JITNEY_STATE_DIR, else ~/.local/state/jitney",
        ),
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running requests get after Ctrl-C.")] = 30.0,
    cpu_bytes: Annotated[
        int | None, typer.Option(min=0, help="Limit of the cache's tier in shared memory.", show_default="1 GiB")
    ] = None,
    ssd_dir: Annotated[Path | None, typer.Option(help="Folder of the cache's SSD tier.", show_default="none")] = None,
    ssd_bytes: Annotated[
        int | None, typer.Option(min=0, help="Limit of the SSD tier; all of it is taken at once.", show_default="8 GiB")
    ] = None,
    executor: Annotated[
        Extra | None, typer.Option(metavar="FLAG", help="Flag for the executor, e.g. --executor=--max-rows=64.")
    ] = None,
    scheduler: Annotated[Extra | None, typer.Option(metavar="FLAG", help="Flag for the schedulers.")] = None,
    cache: Annotated[Extra | None, typer.Option(metavar="FLAG", help="Flag for the cache.")] = None,
) -> None:
    """Start scheduler, cache and executor; start again what dies; drain and stop on Ctrl-C."""
    console = notes()
    if model and not Path(model).exists():
        raise InvalidRequest(f"there is no file or folder {model}", field="model", value=model)
    path = Path(model) if model else fetch_with_bar("default")
    options = ServeOptions(
        state_dir=state_dir or config.state_dir(),
        schedulers=schedulers,
        executor_port=port,
        grace_s=grace,
        executor_args=(f"--model={path}", *(executor or ())),
        scheduler_args=tuple(scheduler or ()),
        cache_args=(*_tiers(cpu_bytes, ssd_dir, ssd_bytes), *(cache or ())),
    )
    logs.configure("supervisor", "info", "console" if console.is_terminal else "json")
    interrupts = _Interrupts()
    supervisor = Supervisor(options)
    if _start(supervisor, interrupts, console):
        _show(supervisor, console)
        interrupts.wait()
    _stop(supervisor, interrupts, console)


def _tiers(cpu_bytes: int | None, ssd_dir: Path | None, ssd_bytes: int | None) -> list[str]:
    """Flags of the cache for what was given."""
    given = {"--cpu-bytes": cpu_bytes, "--ssd-dir": None if ssd_dir is None else ssd_dir.absolute()}
    given["--ssd-bytes"] = ssd_bytes
    return [f"{flag}={value}" for flag, value in given.items() if value is not None]


class _Interrupts:
    """Counts SIGINT and SIGTERM from here on."""

    def __init__(self) -> None:
        self.count = 0
        self._event = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        self.count += 1
        self._event.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the first one."""
        return self._event.wait(timeout_s)


def _start(supervisor: Supervisor, interrupts: _Interrupts, console: Console) -> bool:
    """True once everything serves, False if it was interrupted. Raises what went wrong."""
    failures: list[Exception] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(progress: Progress) -> None:
            bar.update(task, description=progress.stage, completed=progress.fraction)

        def start() -> None:
            try:
                supervisor.start(show)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=start, name="start")
        thread.start()
        while thread.is_alive():
            if interrupts.wait(0.1):
                supervisor.stop(at_once=True)
            thread.join(0.1)
    if interrupts.count:
        return False
    if failures:
        if supervisor.log_path.is_file():
            console.print(f"log: {supervisor.log_path}")
        raise failures[0]
    return True


def _stop(supervisor: Supervisor, interrupts: _Interrupts, console: Console) -> None:
    """Drains; a second signal ends everything at once."""
    seen = interrupts.count
    console.print("stopping: running requests may end (Ctrl-C again: at once)")
    thread = threading.Thread(target=supervisor.stop, name="stop")
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        if interrupts.count > seen:
            supervisor.stop(at_once=True)
    console.print("stopped")


def _show(supervisor: Supervisor, console: Console) -> None:
    pids = supervisor.pids
    targets = {
        "executor": supervisor.executor_target,
        **{f"scheduler-{number}": target for number, target in enumerate(supervisor.scheduler_targets)},
        "cache": supervisor.cache_target,
    }
    for name, target in targets.items():
        console.print(f"{name:<12} {target:<22} pid {pids.get(name, 0)}")
    console.print(f"{'log':<12} {supervisor.log_path}")
    console.print(ready_line(supervisor.executor_target))


def ready_line(target: str) -> str:
    """What to type now, for an executor that listens there."""
    where = "" if target == DEFAULT_TARGET else f" -t {target}"
    commands = [f"jitney {name}{where}" for name in ("generate", "chat", "status")]
    return f"ready: {commands[0]}, {commands[1]} and {commands[2]} talk to it; Ctrl-C stops it"
