"""How the commands that take a prompt read it."""

from __future__ import annotations

import sys

from jitney.client import Client, Message, Prompt
from jitney.errors import InvalidRequest


def text_of(argument: str) -> str:
    """The argument; "-" is what comes from stdin."""
    return sys.stdin.read() if argument == "-" else argument


def asked(client: Client, text: str, system: str = "", raw: bool = False, ids: bool = False) -> Prompt:
    """A chat where the model has a template for one. Raises InvalidRequest."""
    if system and (raw or ids):
        what = f"{'--raw' if raw else '--ids'} sends the prompt as it is, so --system has no place in it"
        raise InvalidRequest(what, field="system")
    if ids:
        parts = text.replace(",", " ").split()
        if wrong := [part for part in parts if not (part.isascii() and part.isdigit())]:
            raise InvalidRequest(f"--ids takes whole numbers, not {wrong[0]!r}", field="prompt", value=wrong[0])
        return [int(part) for part in parts]
    if not is_chat(client, system, raw, ids):
        return text
    return [Message("system", system), Message("user", text)] if system else [Message("user", text)]


def is_chat(client: Client, system: str, raw: bool, ids: bool) -> bool:
    """Whether a text goes through the model's template."""
    return not (raw or ids) and (bool(system) or client.model_info().has_chat_template)
