"""What moves on a terminal: the screen of ``watch``, the bar of ``reload``. Plain escape codes."""

from __future__ import annotations

import os
import shutil
import signal
import termios
import threading
import tty
from collections.abc import Callable, Sequence
from typing import TextIO

from ftctl import view
from ftd.control.protocol import Progress

_ENTER = "\x1b[?1049h\x1b[?25l"  # alternate screen, no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[K\x1b[J"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # one update; terminals that know it show no half

Render = Callable[[int, int], Sequence[str]]  # columns, rows → lines


class Screen:
    """The whole terminal, drawn over and over; what was there before comes back at the end.

    A frame goes out in one piece, between marks that tell terminals to show it at once. While the
    screen is up, q does what Ctrl-C does, and a window of another size is drawn anew at once.
    """

    def __init__(self, stream: TextIO, keys: TextIO | None = None) -> None:
        self._stream = stream
        self._keys = keys if keys is not None and keys.isatty() else None
        self._render: Render = lambda columns, rows: []
        self._drawing = self._stale = False

    def __enter__(self) -> Screen:
        self._stream.write(_ENTER)
        self._stream.flush()
        self._old_winch = signal.signal(signal.SIGWINCH, lambda *_: self._paint())
        # whoever started us may have it ignored, as nohup and job runners do
        self._old_int = signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._keys:
            self._old_keys = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
            threading.Thread(target=self._wait_for_q, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGWINCH, self._old_winch)
        signal.signal(signal.SIGINT, self._old_int)
        if self._keys:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._old_keys)
        self._stream.write(_LEAVE)
        self._stream.flush()

    def draw(self, render: Render) -> None:
        """Show ``render(columns, rows)``, now and whenever the window has another size."""
        self._render = render
        self._paint()

    def _paint(self) -> None:
        self._stale = True
        if self._drawing:  # a signal came while a frame was going out
            return
        self._drawing = True
        try:
            while self._stale:
                self._stale = False
                columns, rows = shutil.get_terminal_size()
                body = f"{_CLEAR_LINE}\r\n".join(self._render(columns, rows)[:rows])
                self._stream.write(f"{_BEGIN}{_HOME}{body}{_CLEAR_BELOW}{_END}")
                self._stream.flush()
        finally:
            self._drawing = False

    def _wait_for_q(self) -> None:
        assert self._keys
        main = threading.main_thread().ident
        while key := os.read(self._keys.fileno(), 1):
            if key in b"qQ" and main is not None:
                signal.pthread_kill(main, signal.SIGINT)
                return


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
