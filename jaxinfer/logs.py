"""Log lines: as text or as JSON, one a record, each with the id of the request it is about.

A line's request id is its `extra={"request_id": ...}`, or else that of the `request_context` around it:

    with request_context(request_id):  # a coroutine, and the threads that asyncio.to_thread starts from it
        logger.info("accepted")
    logger.error("failed", extra={"request_id": request_id})  # a thread that serves many requests at once

Prompts and outputs are never logged.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

from jaxinfer.errors import InvalidArgumentError, JaxinferError

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

# What would end a line, move a terminal's cursor, reverse its text, or fit no encoding: C0 and C1 controls, line and
# paragraph separators, marks and overrides of writing direction, halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class LogFormat(StrEnum):
    """How log lines are written."""

    TEXT = "text"
    JSON = "json"


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Log lines inside are about this request: in this coroutine or thread, and in the tasks it starts."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def describe(error: JaxinferError) -> str:
    """What of an error may be logged: of a refused value its field alone, since the value may be part of a prompt."""
    return f"{error.field} is not allowed" if isinstance(error, InvalidArgumentError) else str(error)


def configure(log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Writes the process's log lines, from WARNING on, to `stream` (standard error); does nothing if they go somewhere.

    Loggers that should say more have their own level set.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER [REQUEST ID]: MESSAGE`, then a traceback, if there is one, in indented lines.

    Nothing that a client sends begins a line: control characters are written as escapes.
    """

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id_of(record)
        about = "" if request_id is None else f" [{request_id}]"
        lines = [f"{_time(record)} {record.levelname} {record.name}{about}: {record.getMessage()}"]
        lines += [f"  {line}" for line in _traceback(self, record).split("\n") if line]
        return "\n".join(map(_escape, lines))


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII.

    Fields: `time` (ISO 8601, UTC, milliseconds), `level`, `logger`, `message`, and where known `request_id`,
    `error_code` (of the JaxinferError that is logged, or `extra={"error_code": ...}`) and `exception` (its traceback).
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": _request_id_of(record),
            "error_code": _error_code_of(record),
            "exception": _traceback(self, record) or None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def _request_id_of(record: logging.LogRecord) -> str | None:
    # Formatted in the thread and the context that logs it, so the context is the record's own.
    own = getattr(record, "request_id", None)
    return _request_id.get() if own is None else str(own)


def _error_code_of(record: logging.LogRecord) -> str | None:
    error = record.exc_info[1] if record.exc_info else None
    return getattr(record, "error_code", error.code if isinstance(error, JaxinferError) else None)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info and record.exc_info[1] else []
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)
