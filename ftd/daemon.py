"""Assemble the daemon and run it: control socket and HTTP at once, the model beside.

    ftd ──► control socket, HTTP port (health: 503) ──► load ──► READY ──► signal, stop, failure
                                                                                │
              exit ◄── socket file removed ◄── HTTP closed ◄── engine closed ◄──┘

Ends within ``EXIT_WITHIN_S`` of a signal whatever the state; a second signal cuts running requests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, NoReturn, cast

import structlog

from ftd import log as logs
from ftd.config import Config
from ftd.control.commands import LifecycleCommands
from ftd.control.server import ControlServer
from ftd.errors import FtdError
from ftd.http.listening import not_listening
from ftd.lifecycle import Lifecycle
from ftd.lifecycle.idle import unload_when_idle
from ftd.lifecycle.served import Models
from ftd.pulse import Pulse
from ftd.systemd import Notifier

log = structlog.get_logger(__name__)

SWITCH_INTERVAL_S = 0.0005  # the engine thread must not wait 5 ms for the GIL between two steps
EXIT_WITHIN_S = 4.5  # of a signal; half a second less than is promised
GRACE_S = 2.5  # of it, for running requests to finish
HTTP_CLOSE_S = 0.5  # of it, for the last bytes of answers


def run(config: Config, models: Models | None = None) -> int:
    """Serve until a signal or ``ftctl stop``; 0 then.

    Raises:
        FtdError: the port or socket is taken, the model cannot be loaded, the engine keeps failing.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    terminal = None if config.log_format == "auto" else config.log_format == "console"
    writer = logs.configure(sys.stderr, level=config.log_level, terminal=terminal)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_Daemon(config, models or _deferred(), writer).run())
    finally:
        writer.close()


class _AskedToEnd(Exception):
    """Ends the group of tasks; no failure."""


class _Daemon:
    def __init__(self, config: Config, models: Models, writer: logs.Writer) -> None:
        self._config = config
        self._writer = writer
        self._lifecycle = Lifecycle(config, models)
        self._notifier = Notifier.from_environ(os.environ)
        self._end_asked = asyncio.Event()
        self._reload_asked = asyncio.Event()
        self._remove_socket: Callable[[], None] = lambda: None
        self._guard: threading.Timer | None = None

    async def run(self) -> int:
        commands = LifecycleCommands(self._lifecycle, stop=self._end)
        commands.api_key_file = self._config.api_key_file
        with self._signals():
            async with AsyncExitStack() as open_ends:
                control = ControlServer(self._config.socket, commands)
                open_ends.push_async_callback(control.close)  # last: ftctl stop waits for it
                self._remove_socket = control.remove_file
                await control.start()
                http = await open_ends.enter_async_context(_http(self._lifecycle, self._config))
                commands.http = http
                log.info("daemon.started", http=http, socket=str(self._config.socket))
                try:
                    await self._work(http)
                finally:
                    self._guard_exit()
                    self._notifier.stopping()
                    await self._lifecycle.stop(min(GRACE_S, self._config.drain_timeout))
        log.info("daemon.ended")
        return 0

    async def _work(self, http: str) -> None:
        """Load and look after the model. Returns when asked to end; raises FtdError."""
        pulse = Pulse(self._lifecycle, self._notifier, self._writer, http)
        failure: FtdError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._wait_end())
                tasks.create_task(self._load(http))
                tasks.create_task(self._reload_when_asked())
                tasks.create_task(self._lifecycle.supervise())
                tasks.create_task(self._lifecycle.balance())
                if self._config.idle_unload is not None:
                    tasks.create_task(unload_when_idle(self._lifecycle, self._config.idle_unload))
                tasks.create_task(pulse.run())
        except* _AskedToEnd:
            pass
        except* FtdError as group:
            failure = next(_leaves(group))
        if failure:
            raise failure

    async def _load(self, http: str) -> None:
        began_s = time.monotonic()
        await self._lifecycle.load()
        load_s = round(time.monotonic() - began_s, 3)
        log.info("model.loaded", http=http, model=self._config.model, load_s=load_s)
        self._notifier.ready()

    async def _reload_when_asked(self) -> NoReturn:
        while True:
            await self._reload_asked.wait()
            self._reload_asked.clear()
            try:
                await self._lifecycle.reload(timeout_s=self._config.drain_timeout)
            except FtdError as error:  # the old model serves on, or health says why not
                log.warning("daemon.reload_failed", error=str(error))

    async def _wait_end(self) -> NoReturn:
        await self._end_asked.wait()
        raise _AskedToEnd

    def _end(self) -> None:
        if self._end_asked.is_set():
            self._lifecycle.cut()
            return
        self._end_asked.set()
        self._guard_exit()

    def _guard_exit(self) -> None:
        """Leave the process by force, should anything hang while it ends."""
        if self._guard is None:
            self._guard = threading.Timer(EXIT_WITHIN_S, self._leave)
            # a daemon, never cancelled: leaving the interpreter can hang too
            self._guard.name, self._guard.daemon = "ftd-exit-guard", True
            self._guard.start()

    def _leave(self) -> None:
        self._remove_socket()
        os.write(2, b"ftd: something hung while ending; left by force\n")
        os._exit(1)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def end(name: str) -> None:
            log.info("daemon.signalled", signal=name, cut=self._end_asked.is_set())
            self._end()

        def reload() -> None:
            log.info("daemon.signalled", signal="SIGHUP")
            self._reload_asked.set()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, end, "SIGTERM")
        loop.add_signal_handler(signal.SIGINT, end, "SIGINT")
        loop.add_signal_handler(signal.SIGHUP, reload)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)


@asynccontextmanager
async def _http(lifecycle: Lifecycle, config: Config) -> AsyncIterator[str]:
    """The HTTP front end on its port; gives the address it listens on."""
    from aiohttp import web

    from ftd.http.app import make_app, make_runner

    runner = make_runner(make_app(lifecycle, config), close_s=HTTP_CLOSE_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.http.host, config.http.port).start()
        except OSError as error:
            raise not_listening(config.http, error) from error
        host, port = runner.addresses[0][:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def _leaves(group: BaseExceptionGroup[FtdError]) -> Iterator[FtdError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for this platform
        return None
    return uvloop.new_event_loop


def _deferred() -> Models:
    """Real checkpoints, imported on the first thread that loads: torch takes seconds, and the port
    must not wait for it."""

    class Deferred:
        def __getattr__(self, name: str) -> Any:
            from ftd.lifecycle.checkpoints import Checkpoints

            return getattr(Checkpoints(), name)

    return cast(Models, Deferred())
