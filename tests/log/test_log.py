"""The log: one format for all, never in the way, nothing of a prompt."""

import io
import json
import logging
import os
import re
import threading
import warnings

import pytest
import structlog

from ftd import log as logs


class Stalled(io.StringIO):
    """A stream whose reader sleeps until the test says so."""

    def __init__(self):
        super().__init__()
        self.reading, self.written = threading.Event(), threading.Event()

    def write(self, text):
        self.written.set()
        self.reading.wait(10)
        return super().write(text)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def restored():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_both_clocks_and_its_facts():
    stream = io.StringIO()
    writer = logs.configure(stream)
    structlog.get_logger().info("budget.changed", slots=3072, was=2048)
    writer.close()
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["slots"]) == ("budget.changed", "info", 3072)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["ts"])
    assert line["mono_s"] > 0
    assert list(line)[:3] == ["ts", "level", "event"]


def test_level_and_stdlib_logging_and_warnings():
    stream = io.StringIO()
    writer = logs.configure(stream, level="warning")
    structlog.get_logger().info("left.out")
    logging.getLogger("asyncio").info("left out too")
    logging.getLogger("asyncio").warning("%s took long", "a task")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old thing", stacklevel=1)
    writer.close()
    first, second = lines(stream)
    assert (first["event"], first["logger"]) == ("a task took long", "asyncio")
    assert "old thing" in second["event"]


def test_facts_of_any_type_are_written():
    stream = io.StringIO()
    writer = logs.configure(stream)
    structlog.get_logger().info("x.y", path=os, keys={1: object()}, text="\udcff\n")
    writer.close()
    assert stream.getvalue().count("\n") == 1


def test_tracebacks_do_not_show_locals():
    def fail(prompt):
        raise ValueError("bad")

    for terminal in (False, True):
        stream = io.StringIO()
        writer = logs.configure(stream, terminal=terminal)
        try:
            fail("xylo" + "phone")
        except ValueError:
            structlog.get_logger().exception("step.failed")
        writer.close()
        assert "ValueError: bad" in stream.getvalue()
        assert "xylophone" not in stream.getvalue()


def test_a_stalled_stream_costs_lines_not_time(monkeypatch):
    monkeypatch.setattr(logs, "CAPACITY_LINES", 10)
    stream = Stalled()
    writer = logs.configure(stream)
    log = structlog.get_logger()
    log.info("first.line")
    assert stream.written.wait(10)
    for number in range(25):
        log.info("more.lines", number=number)
    stream.reading.set()
    while writer.waiting:
        pass
    log.info("last.line")
    writer.close(10)
    events = [line["event"] for line in lines(stream)]
    assert events[0] == "first.line" and events.count("more.lines") == 10
    assert {"event": "log.dropped", "lines": 15} in lines(stream)


def test_a_stream_that_is_gone_does_no_harm():
    stream = io.StringIO()
    writer = logs.configure(stream)
    stream.close()
    structlog.get_logger().info("to.nobody")
    writer.close()


def test_the_pinned_line_stays_below_the_log():
    stream = Terminal()
    writer = logs.configure(stream, terminal=True)
    writer.pin("[##--]")
    writer.pin("[##--]")
    structlog.get_logger().info("engine.loaded", slots=3)
    writer.pin("")
    writer.close()
    out = stream.getvalue()
    assert out.startswith("\r\x1b[K[##--]\r\x1b[K")
    assert "engine.loaded" in out and "slots" in out
    assert out.endswith("\n[##--]\r\x1b[K")
