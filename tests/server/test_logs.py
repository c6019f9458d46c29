"""Log lines in both formats: one line a record, the request it is about, and nothing a client sent that breaks it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer import logs
from jaxinfer.errors import InvalidArgumentError, StepFailedError
from jaxinfer.logs import JsonFormatter, LogFormat, TextFormatter, request_context

ROOT = Path(__file__).resolve().parent.parent.parent
NASTY = 'id\n2026-01-01T00:00:00.000Z ERROR forged\r\x1b[2J\x00\x85\u2028\u202e\ud800"\\ é'


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(params=[TextFormatter, JsonFormatter])
def formatter(request) -> logging.Formatter:
    return request.param()


def logger_to(stream: io.StringIO, formatter: logging.Formatter) -> logging.Logger:
    logger = logging.Logger("jaxinfer.test")  # one of its own, in nobody's tree
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return logger


def objects(stream: io.StringIO) -> list[dict[str, str]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_has_its_fields(stream):
    logger_to(stream, JsonFormatter()).warning("%d of %s", 3, "é", extra={"request_id": "r1"})
    [line] = objects(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {"level": "WARNING", "logger": "jaxinfer.test", "message": "3 of é", "request_id": "r1"}
    assert stream.getvalue().isascii()


def test_the_time_is_utc_to_the_millisecond(stream, formatter):
    record = logging.LogRecord("jaxinfer.test", logging.INFO, "", 0, "hello", None, None)
    record.created = 1767225600.1239
    assert "2026-01-01T00:00:00.123Z" in formatter.format(record)


def test_a_text_line_names_the_request(stream):
    logger = logger_to(stream, TextFormatter())
    logger.warning("with", extra={"request_id": "r1"})
    logger.warning("without")
    with_id, without = (line.split(" ", 1)[1] for line in stream.getvalue().splitlines())
    assert with_id == "WARNING jaxinfer.test [r1]: with"
    assert without == "WARNING jaxinfer.test: without"


def test_an_error_brings_its_code_and_traceback(stream):
    logger = logger_to(stream, JsonFormatter())
    try:
        raise StepFailedError("step 3 failed")
    except StepFailedError:
        logger.exception("bad")
    logger.error("told", extra={"error_code": "queue_full"})
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("not ours")
    ours, told, other = objects(stream)
    assert ours["error_code"] == "step_failed"
    assert ours["exception"].startswith("Traceback")
    assert ours["exception"].endswith("StepFailedError: step 3 failed")
    assert told["error_code"] == "queue_full"
    assert "exception" not in told
    assert "error_code" not in other


def test_nothing_a_client_sends_breaks_a_line(stream, formatter):
    logger = logger_to(stream, formatter)
    logger.warning("request %s", NASTY, extra={"request_id": NASTY})
    written = stream.getvalue()
    assert written.count("\n") == 1
    assert len(written.splitlines()) == 1  # of all characters that Python takes for the end of a line
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", written)
    written.encode("utf-8")
    if isinstance(formatter, JsonFormatter):
        assert json.loads(written)["request_id"] == NASTY


def test_a_traceback_cannot_forge_a_line(stream, formatter):
    logger = logger_to(stream, formatter)
    try:
        raise ValueError(NASTY)
    except ValueError:
        logger.exception("failed")
    first, *rest = stream.getvalue().split("\n")[:-1]
    assert "failed" in first
    if isinstance(formatter, JsonFormatter):
        assert not rest
    else:
        assert len(rest) > 2
        assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in stream.getvalue()


def test_the_context_names_the_request_in_tasks_and_threads(stream):
    logger = logger_to(stream, JsonFormatter())

    async def request(request_id: str) -> None:
        with request_context(request_id):
            for _ in range(3):
                await asyncio.sleep(0)
                logger.warning(request_id)
            await asyncio.to_thread(logger.warning, request_id)
        logger.warning("after")

    async def main() -> None:
        await asyncio.gather(*(request(f"r{i}") for i in range(5)))

    asyncio.run(main())
    lines = objects(stream)
    assert len(lines) == 25
    assert all(line.get("request_id") == (None if line["message"] == "after" else line["message"]) for line in lines)


def test_a_records_own_id_comes_before_the_contexts(stream):
    logger = logger_to(stream, JsonFormatter())
    with request_context("outer"):
        with request_context("inner"):
            logger.warning("1")
        logger.warning("2")
        logger.warning("3", extra={"request_id": "own"})
    assert [line["request_id"] for line in objects(stream)] == ["inner", "outer", "own"]


def test_what_is_logged_of_a_refused_value_is_its_field():
    error = InvalidArgumentError("messages[0]", {"role": "user", "contents": "my secret"}, "a mapping")
    assert "secret" in str(error)
    assert logs.describe(error) == "messages[0] is not allowed"
    assert logs.describe(StepFailedError("step 3 failed")) == "step 3 failed"


@pytest.mark.parametrize("log_format", LogFormat)
def test_configure_writes_to_standard_error(log_format):
    script = (
        "import logging; from jaxinfer.logs import *\n"
        f"configure(LogFormat({str(log_format)!r}))\n"
        "logging.getLogger('other').info('too low')\n"
        "logging.getLogger('jaxinfer').setLevel(logging.INFO)\n"
        "with request_context('r1'): logging.getLogger('jaxinfer.x').info('hello')"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == ""
    [line] = run.stderr.splitlines()
    if log_format is LogFormat.JSON:
        assert json.loads(line)["request_id"] == "r1"
    else:
        assert line.endswith(" INFO jaxinfer.x [r1]: hello")
