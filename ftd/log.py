"""Where log lines go: structlog and stdlib logging, one format, written by a thread of its own.

JSON unless on a terminal. The loop and the engine thread only append to a queue: a stalled journal
or a terminal under Ctrl-S costs lines, never a step. Each line has the wall clock (``ts``, UTC) and
the monotonic clock (``mono_s``), which alone may be subtracted. Tracebacks never show local
variables: prompts live there.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import orjson
import structlog

CAPACITY_LINES = 10_000  # what a stalled reader may cost in memory, a few MB
_CLEAR_LINE = "\r\x1b[K"

Event = structlog.typing.EventDict


class Writer:
    """Writes whole lines to a stream from its own thread; callers never wait.

    On a terminal one line may be pinned below the log: a progress bar.
    """

    def __init__(self, stream: TextIO) -> None:
        self.terminal = stream.isatty()
        self._stream = stream
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._asked_to_pin = self._pinned = ""
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="ftd-log", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many lines are not written yet."""
        return self._queue.qsize()

    def line(self, text: str) -> None:
        """Queue one line; dropped and counted if ``CAPACITY_LINES`` wait already."""
        if self.waiting >= CAPACITY_LINES:
            self._dropped += 1
        else:
            self._queue.put(lambda: self._write_line(text))

    def pin(self, text: str) -> None:
        """Show ``text`` below the log from now on; empty takes it away. Terminals only."""
        assert self.terminal
        if text != self._asked_to_pin and self.waiting < CAPACITY_LINES:
            self._asked_to_pin = text
            self._queue.put(lambda: self._write_pinned(text))

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is queued, then end the thread; give up on a stalled stream."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (write := self._queue.get()) is not None:
            try:
                write()
                if self._queue.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                continue  # the stream is gone, and with it anybody who could be told

    def _write_line(self, text: str) -> None:
        if dropped := self._dropped:
            self._dropped -= dropped
            text += f'\n{{"event":"log.dropped","lines":{dropped}}}'
        self._stream.write(f"{_CLEAR_LINE}{text}\n{self._pinned}" if self._pinned else f"{text}\n")

    def _write_pinned(self, text: str) -> None:
        self._pinned = text
        self._stream.write(_CLEAR_LINE + text)


class _Lines:
    """What structlog calls a logger: every level appends to the writer."""

    def __init__(self, writer: Writer) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = writer.line
        self.exception = self.msg = self.log = writer.line


class _ToWriter(logging.Handler):
    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.line(self.format(record))


def configure(stream: TextIO, *, level: str = "info", terminal: bool | None = None) -> Writer:
    """Send structlog and stdlib logging to ``stream``.

    Args:
        terminal: coloured lines for people instead of JSON; by default asks the stream.
    Returns:
        The writer; its owner closes it last.
    """
    writer = Writer(stream)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.StackInfoRenderer(),
        _stamp,
    ]
    if writer.terminal if terminal is None else terminal:
        renderer: list[structlog.typing.Processor] = [
            _short_clock,
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ]
    else:
        renderer = [structlog.processors.format_exc_info, _event_first, _to_json]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *_: _Lines(writer),
        cache_logger_on_first_use=False,  # tests configure anew; no hot path logs
    )
    handler = _ToWriter(writer)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.WARNING))  # other people's chatter is not our log
    logging.captureWarnings(True)
    return writer


def _stamp(_logger: Any, _method: str, event: Event) -> Event:
    now = time.time()
    event["ts"] = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1e3):03}Z"
    event["mono_s"] = round(time.monotonic(), 6)
    return event


def _short_clock(_logger: Any, _method: str, event: Event) -> Event:
    """A person wants local time to the second, in the place structlog shows first."""
    del event["ts"], event["mono_s"]
    event["timestamp"] = time.strftime("%H:%M:%S")
    return event


def _event_first(_logger: Any, _method: str, event: Event) -> Event:
    first = {key: event.pop(key) for key in ("ts", "level", "event") if key in event}
    return {**first, **event}


def _to_json(_logger: Any, _method: str, event: Event) -> str:
    try:
        return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # a file name that is not UTF-8, an integer of more than 64 bits
        return json.dumps(event, default=repr)
