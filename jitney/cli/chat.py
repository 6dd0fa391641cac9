"""`jitney chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from jitney.cli import common, sampling
from jitney.cli.generate import stats_line
from jitney.client import Chat, Client, Delta, Options
from jitney.errors import Away, JitneyError

HELP = "/new starts again, /stats shows counts and times, /quit (or Ctrl-D) ends; Ctrl-C stops an answer."


def chat(
    system: sampling.System = "",
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = 0.7,
    top_p: sampling.TopP = 0.95,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    seed: sampling.Seed = None,
    salt: sampling.Salt = "",
    stats: Annotated[bool, typer.Option("--stats", help="Times and counts after every answer, on stderr.")] = False,
    target: common.Target = common.TARGET,
    patience: common.Patience = common.PATIENCE_S,
    tls_ca: common.TlsCa = None,
) -> None:
    """Talks with the model. Where stdin is no terminal, every line is a turn."""
    options = Options(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, salt=salt
    )  # fmt: skip
    console, notes = common.out(), common.notes()
    with common.client(target, patience, tls_ca) as client:
        info = client.model_info()
        if not info.has_chat_template:
            raise JitneyError(f"{info.name} has no chat template: use `jitney generate --raw`")
        if sys.stdin.isatty():
            notes.print(f"{info.name} on {target}. {HELP}", style="dim")
        _talk(client, system, options, console, notes, stats)


def _talk(client: Client, system: str, options: Options, console: Console, notes: Console, stats: bool) -> None:
    session = client.chat(system, options)
    while (line := _next_line(console)) is not None:
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/help":
                notes.print(HELP, style="dim")
            case "/new":
                session = client.chat(system, options)
            case "/stats":
                stats = not stats
                notes.print("stats on" if stats else "stats off", style="dim")
            case _:
                _turn(session, line, notes, stats)


def _next_line(console: Console) -> str | None:
    """None at the end of input."""
    try:
        return console.input("[bold cyan]you>[/] ", markup=True) if sys.stdin.isatty() else input()
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            console.print()
        return None


def _turn(session: Chat, line: str, notes: Console, stats: bool) -> None:
    """One answer. An error of this turn leaves the conversation as it was; a lost executor ends it."""
    with session.send(line) as answer:
        try:
            for event in answer:
                if isinstance(event, Delta):
                    common.emit(event.text)
            common.emit("\n")
            if stats:
                notes.print(stats_line(answer.result()), style="dim")
        except KeyboardInterrupt:
            common.emit("\n")
            notes.print("stopped; this turn is forgotten", style="dim")
        except Away:
            raise
        except JitneyError as error:
            common.emit("\n")
            notes.print(f"jitney: {common.said(error)}", style="red")
