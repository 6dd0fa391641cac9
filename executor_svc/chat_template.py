"""The model's own chat template, run in a sandbox.

Semantics and variables: those of `apply_chat_template` in Hugging Face transformers, so that a template renders here
as it does there: blocks trimmed, loop controls, `raise_exception`, `strftime_now`, `tojson` without escapes, and the
`generation` block, which is rendered as its content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jitney.errors import InvalidRequest

Message = Mapping[str, str]
"""`role` and `content`."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template; rendering is safe from any thread."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables`: what the template may read beside the messages (bos_token and the like)."""
        self.source = source
        self._variables = dict(variables)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template does not compile: {error}", field="chat_template"
            ) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation. Raises InvalidRequest with what the template objects to."""
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._variables,
            )
        except Exception as error:  # a template is foreign code: whatever it does is the request's own fault
            raise InvalidRequest(f"the model's chat template refuses the messages: {error}", field="chat") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
