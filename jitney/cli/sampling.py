"""The options of `generate` and `chat` that say how to answer."""

from __future__ import annotations

from typing import Annotated

import typer

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", "-n", help="Most tokens of the answer. Default: what fits.")
]
Temperature = Annotated[float, typer.Option("--temperature", "-T", help="0: always the likeliest token.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Draw from the likeliest tokens of this much probability.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Draw from so many of the likeliest tokens; 0: all.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Leave out tokens below this share of the likeliest.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be given often.")]
System = Annotated[str, typer.Option("--system", help="What the model is told before the conversation.")]
Priority = Annotated[int, typer.Option("--priority", help="-100 to 100; larger is more urgent.")]
Tenant = Annotated[str, typer.Option("--tenant", help="On whose behalf.")]
Salt = Annotated[str, typer.Option("--salt", help="Only requests of the same salt share cached blocks.")]
DeadlineMs = Annotated[int | None, typer.Option("--deadline-ms", help="End the answer after so many milliseconds.")]
