"""Shows the streams while they come: a live table on a terminal, a line for each answer elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jitney.demo.play import Changed, Stream
from jitney.demo.summary import Summary, show

REFRESH_S: Final = 0.12
STYLES: Final = {
    "waiting": "yellow",
    "running": "cyan",
    "later": "dim",
    "stop": "green",
    "length": "green",
    "aborted": "magenta",
}


@contextlib.asynccontextmanager
async def board(console: Console, streams: list[Stream]) -> AsyncIterator[Changed]:
    """Yields what is to be called after each event."""
    if not console.is_terminal:
        lines = _Lines(console, streams)
        yield lines.changed
        return
    with Live(_table(console, streams), console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        painter = asyncio.create_task(_paint(live, console, streams))
        try:
            yield lambda stream: None
        finally:
            painter.cancel()
            await asyncio.gather(painter, return_exceptions=True)
            live.update(_table(console, streams), refresh=True)


async def _paint(live: Live, console: Console, streams: list[Stream]) -> None:
    while True:
        live.update(_table(console, streams), refresh=True)
        await asyncio.sleep(REFRESH_S)


def draw(path: Path, streams: list[Stream], found: Summary) -> None:
    """An SVG of the board and the summary at the end of a run."""
    console = Console(
        record=True, file=io.StringIO(), width=110, force_terminal=True, highlight=False, markup=False, emoji=False
    )
    console.print(_table(console, streams))
    show(console, found)
    console.save_svg(str(path), title="make demo")


def _table(console: Console, streams: list[Stream]) -> Table:
    table = Table(box=None, padding=(0, 1), show_edge=False, expand=True)
    for name, style in (("request", "bold"), ("state", ""), ("tokens", "")):
        table.add_column(name, style=style, no_wrap=True, justify="right" if name == "tokens" else "left")
    table.add_column("text", no_wrap=True, overflow="crop", ratio=1)
    room = max(20, console.width - 40)
    for number, stream in enumerate(streams, 1):
        state = Text(stream.state, STYLES.get(stream.state, "red"))
        table.add_row(f"{number:2} {stream.name}", state, str(stream.tokens), Text(tail(stream, room)))
    return table


def tail(stream: Stream, room: int) -> str:
    """The end of the text, in one line of at most `room` characters; an error instead of a text."""
    text = " ".join((stream.error or stream.text).split())
    return text if len(text) <= room else "…" + text[1 - room :]


class _Lines:
    """One line when an answer ends."""

    def __init__(self, console: Console, streams: list[Stream]) -> None:
        self._console = console
        self._streams = streams
        self._ended = 0

    def changed(self, stream: Stream) -> None:
        if stream.finished is None and not stream.error:
            return
        self._ended += 1
        text = " ".join((stream.error or stream.text).split())
        text = text if len(text) <= 90 else text[:89] + "…"
        count = f"{self._ended:2}/{len(self._streams)}"
        self._console.print(f"{count}  {stream.name:<10} {stream.state:<8} {stream.tokens:4} tokens  {text}")
