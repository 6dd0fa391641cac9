"""`jitney policy` and `jitney explain`: who decides, and why a request is where it is."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from jitney.cli import common
from jitney.errors import InvalidRequest

app = typer.Typer(no_args_is_help=True, help="The policy that decides.")


@app.command(name="set")
def set_policy(
    name: Annotated[str, typer.Argument(help='E.g. "fcfs"; an unknown name is answered with those known.')],
    parameters: Annotated[list[str] | None, typer.Argument(help="NAME=INTEGER, any number of them.")] = None,
    target: common.Target = common.TARGET,
    patience: common.Patience = common.PATIENCE_S,
    tls_ca: common.TlsCa = None,
) -> None:
    """Changes the policy between two steps, after a trial."""
    chosen = dict(_parameter(text) for text in parameters or [])
    with common.client(target, patience, tls_ca) as client:
        step = client.set_policy(name, chosen)
    print(f"{name} decides from step {step} on")


def _parameter(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name, int(value)
    except ValueError as error:
        raise InvalidRequest(f"a parameter must be NAME=INTEGER, not {text!r}", field=name, value=text) from error


def explain(
    request_id: Annotated[str, typer.Argument(help="Id of a live request: see `jitney generate --request-id`.")],
    as_json: common.AsJson = False,
    target: common.Target = common.TARGET,
    patience: common.Patience = common.PATIENCE_S,
    tls_ca: common.TlsCa = None,
) -> None:
    """Says why a live request is where it is, and what happened to it."""
    with common.client(target, patience, tls_ca) as client:
        found = client.explain(request_id)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    common.out().print(f"{found.state}: {found.sentence}" if found.sentence else found.state)
    for line in found.history:
        common.out().print(f"  {line}")
