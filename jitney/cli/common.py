"""What the commands share: the target, the two consoles, and one sentence and one exit status for every error.

Exit statuses: 0 all well; 1 something else; 2 wrong arguments or a refused request; 3 nobody answers;
4 a deadline passed; 5 full (try again later); 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from jitney.client import DEFAULT_TARGET, Client, FinishReason, RetryPolicy
from jitney.errors import Away, Expired, InvalidRequest, JitneyError, TooLarge

EXIT_CODES: Final[tuple[tuple[type[JitneyError], int], ...]] = (
    (InvalidRequest, 2),
    (Away, 3),
    (Expired, 4),
    (TooLarge, 5),
)
FINISH_CODES: Final = {FinishReason.STOP: 0, FinishReason.LENGTH: 0, FinishReason.DEADLINE: 4}
INTERRUPTED: Final = 130
_NO_CONTROLS: Final = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)]) | {0x09: "\t", 0x0A: "\n"}

Target = Annotated[
    str, typer.Option("--target", "-t", envvar="JITNEY_TARGET", help="Address of the executor, HOST:PORT.")
]
TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar="JITNEY_TLS_CA", help="PEM file of the authority to trust; turns TLS on."),
]
Patience = Annotated[
    float, typer.Option("--patience", min=0.0, help="Seconds to go on trying while the executor is away.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

TARGET: Final = DEFAULT_TARGET
PATIENCE_S: Final = 3.0


def exit_code(error: JitneyError) -> int:
    """Of the nearest class that has one."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1)


def said(error: JitneyError) -> str:
    """The error in one line."""
    text = " ".join(error.message.split())
    if error.retry_after_us > 0:
        text += f" (try again in {error.retry_after_us / 1e6:.1f} s)"
    return text


class Group(TyperGroup):
    """Commands whose errors are one line on stderr and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except JitneyError as error:
            typer.echo(f"jitney: {said(error)}", err=True)
            raise typer.Exit(exit_code(error)) from error
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def client(target: str, patience_s: float, tls_ca: Path | None) -> Client:
    """A client that gives up on a target that is not there after `patience_s`, and on one that went away, later."""
    retry = RetryPolicy(connect_s=patience_s, resume_s=max(patience_s, RetryPolicy().resume_s if patience_s else 0.0))
    return Client(target, retry=retry, tls_ca=tls_ca)


def out() -> Console:
    """The console of results."""
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def notes() -> Console:
    """The console of remarks, on stderr."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


def emit(text: str) -> None:
    """Text of a model, at once: exactly as it is into a file or pipe, without control characters on a terminal."""
    sys.stdout.write(text.translate(_NO_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
