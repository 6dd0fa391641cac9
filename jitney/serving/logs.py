"""Logs: one JSON object a line (or colours on a terminal), on stderr, from structlog and the standard library alike."""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(
    service: str,
    level: Literal["debug", "info", "warning", "error"] = "info",
    form: Literal["auto", "json", "console"] = "auto",
) -> None:
    """Sets logging up for this process. Each line carries time, level, service and process id."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor
    if console:
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    else:
        renderer = structlog.processors.JSONRenderer(default=str)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not console:
        # Frames without their local variables: those hold prompts.
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        shared.append(structlog.processors.ExceptionRenderer(transformer))
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        # One write a line: several processes append to one file.
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service, pid=os.getpid())

    root = logging.getLogger()
    root.handlers = [_ToStructlog()]
    root.setLevel(logging.WARNING)


def get(name: str = "") -> structlog.typing.FilteringBoundLogger:
    """A logger; `name` says which part of the service speaks."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger.bind(part=name) if name else logger


class _ToStructlog(logging.Handler):
    """What libraries log through the standard library, in the same form."""

    def emit(self, record: logging.LogRecord) -> None:
        logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
        logger.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)
