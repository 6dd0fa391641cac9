"""`jitney replay`, `what-if` and `shadow`: what a decision log can tell. Each runs a program of the service's own, so
that deciding is the service's very code."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

Log = Annotated[Path, typer.Argument(help="Folder of a decision log, or one of its segments.")]
Policy = Annotated[str, typer.Option("--policy", help='The other policy: a name, e.g. "mlfq", or path.py:ClassName.')]
Parameters = Annotated[list[str] | None, typer.Argument(help="NAME=INTEGER of the policy, any number of them.")]


def replay(
    log: Log,
    any_build: Annotated[bool, typer.Option("--any-build", help="Replay what another build decided, too.")] = False,
    policy_file: Annotated[
        str, typer.Option("--policy-file", help="The policy of your own that decided: path.py:ClassName.")
    ] = "",
) -> None:
    """Decides every recorded step again and compares the bytes. Exit status 1 if one differs, 2 if it cannot."""
    own = (f"--policy-file={policy_file}",) if policy_file else ()
    run_program("scheduler_svc.replay", str(log), *own, *(("--any-build",) if any_build else ()))


def what_if(log: Log, policy: Policy, parameters: Parameters = None) -> None:
    """Carries a recorded load forward under another policy, beside the recorded one."""
    run_program("simulator.what_if", str(log), f"--policy={policy}", *(parameters or []))


def shadow(
    log: Log,
    policy: Policy,
    parameters: Parameters = None,
    once: Annotated[bool, typer.Option("--once", help="From the oldest frame to the end, then stop.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="Stop after so long; 0: when told to.")] = 0.0,
) -> None:
    """Another policy follows the log of a live system, never acts, and says how often it would decide otherwise."""
    limits = (*(("--once",) if once else ()), *((f"--seconds={seconds}",) if seconds else ()))
    run_program("scheduler_svc.shadow", str(log), f"--policy={policy}", *limits, *(parameters or []))


def run_program(module: str, *argv: str) -> None:
    """Runs a program of one of the services; its exit status is this one's."""
    with subprocess.Popen([sys.executable, "-m", module, *argv]) as process:
        with contextlib.suppress(KeyboardInterrupt):  # the program is interrupted too, and has the last word
            process.wait()
        raise typer.Exit(process.wait())
