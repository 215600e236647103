"""What moves on a terminal: the screen of ``watch``, the bar of ``reload``. Plain escape codes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TextIO

from ftctl import view
from ftd.control.protocol import Progress

_ENTER = "\x1b[?1049h\x1b[?25l"  # alternate screen, no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """The whole terminal, drawn over and over; what was there before comes back at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> Screen:
        self._stream.write(_ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.write(_LEAVE)
        self._stream.flush()

    @property
    def columns(self) -> int:
        return shutil.get_terminal_size().columns

    def draw(self, lines: Sequence[str]) -> None:
        shown = lines[: shutil.get_terminal_size().lines - 1]
        body = "".join(f"{line}{_CLEAR_LINE}\r\n" for line in shown)
        self._stream.write(_HOME + body + _CLEAR_BELOW)
        self._stream.flush()


class Bar:
    """One line of progress, in place on a terminal; elsewhere one line for each phase."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._moves = stream.isatty()
        self._phase = ""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._moves:
            self._stream.write(f"\r{_CLEAR_LINE}")
            self._stream.flush()

    def draw(self, progress: Progress) -> None:
        if self._moves:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"\r{view.progress(progress, columns)}{_CLEAR_LINE}")
        elif progress.phase != self._phase:
            self._stream.write(f"{progress.phase}\n")
        self._phase = progress.phase
        self._stream.flush()
