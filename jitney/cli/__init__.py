"""The command line: `jitney serve | demo | generate | chat | status | explain | audit | replay | what-if | shadow |
cache | lengths | model | policy`."""

from __future__ import annotations

import typer

from jitney.cli import cache, lengths, logs, model, policy
from jitney.cli.chat import chat
from jitney.cli.common import Group
from jitney.cli.demo import demo
from jitney.cli.generate import generate
from jitney.cli.serve import serve
from jitney.cli.status import status

app = typer.Typer(cls=Group, no_args_is_help=True, help="A language model, served by three processes.")
app.command()(serve)
app.command()(demo)
app.command()(generate)
app.command()(chat)
app.command()(status)
app.command()(policy.explain)
app.command()(cache.audit)
app.command()(logs.replay)
app.command()(logs.what_if)
app.command()(logs.shadow)
app.add_typer(cache.app, name="cache")
app.add_typer(lengths.app, name="lengths")
app.add_typer(model.app, name="model")
app.add_typer(policy.app, name="policy")


def main() -> None:
    """The entry point of the `jitney` command."""
    app()
