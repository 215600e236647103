"""What the daemon tells while it lives: systemd its status and that it moves, a terminal a bar."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

import structlog

from ftd.lifecycle import Lifecycle
from ftd.lifecycle.served import Progress, State
from ftd.log import Writer
from ftd.systemd import Notifier
from ftd.units import format_bytes

log = structlog.get_logger(__name__)

BEAT_S = 0.25
LOG_LOADING_S = 5.0  # between two lines about an operation, where no terminal shows a bar
BAR_CELLS = 30


class Pulse:
    """Looks at the lifecycle each ``BEAT_S`` and at every change.

    The watchdog is fed only if whoever works has moved on since it was fed last: the engine by
    steps, the loader by pieces, else the event loop by being here.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        notifier: Notifier,
        writer: Writer,
        http: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._notifier = notifier
        self._writer = writer
        self._http = http
        self._clock = clock
        self._fed_beat: int | None = None
        self._fed_s = float("-inf")
        self._reloading = False
        self._logged_s = clock()

    async def run(self) -> NoReturn:
        try:
            while True:
                self.beat()
                try:
                    async with asyncio.timeout(BEAT_S):
                        await self._lifecycle.wait_changed()
                except TimeoutError:
                    continue
        finally:
            self._show(None)

    def beat(self) -> None:
        self._notifier.status(describe(self._lifecycle, self._http))
        self._tell_reloading()
        self._feed_watchdog()
        self._show(self._lifecycle.progress)

    def _tell_reloading(self) -> None:
        reloading = self._lifecycle.state is State.RELOADING
        if reloading != self._reloading:
            self._reloading = reloading
            (self._notifier.reloading if reloading else self._notifier.ready)()

    def _feed_watchdog(self) -> None:
        if self._notifier.watchdog_s is None:
            return
        beat, now_s = self._lifecycle.heartbeat, self._clock()
        if beat != self._fed_beat and now_s - self._fed_s >= self._notifier.watchdog_s / 4:
            self._notifier.watchdog()
            self._fed_beat, self._fed_s = beat, now_s

    def _show(self, progress: Progress | None) -> None:
        if self._writer.terminal:
            self._writer.pin(bar(progress) if progress else "")
        elif progress is None:
            self._logged_s = self._clock()
        elif self._clock() - self._logged_s >= LOG_LOADING_S:
            self._logged_s = self._clock()
            log.info("model.progressed", **progress.facts())


def describe(lifecycle: Lifecycle, http: str) -> str:
    """One line for people who look at the service."""
    if lifecycle.ready:
        model = lifecycle.current().name
        reloading = (
            f"; reloading: {lifecycle.progress}" if lifecycle.state is State.RELOADING else ""
        )
        return f"Serving {model} at {http}{reloading}"
    return f"{str(lifecycle.state).capitalize()}: {lifecycle.health()['cause']}"


def bar(progress: Progress) -> str:
    """Less than 80 columns, made again and again."""
    if progress.fraction is None:
        return f"{progress.phase} ..."
    full = int(progress.fraction * BAR_CELLS)
    cells = "#" * full + "-" * (BAR_CELLS - full)
    done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
    return f"{progress.phase} [{cells}] {progress.fraction:4.0%} {done} of {total}"
