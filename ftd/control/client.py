"""A typed client of the control socket: plain blocking sockets, no asyncio needed.

with Client(default_socket()) as ftd:
    print(ftd.call(Status()).model)
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ftd.control.lines import Malformed, build, decode_object, encode_command
from ftd.control.protocol import Command, Error, Progress, entry_of

ANSWER_TIMEOUT_S = 10.0  # ftd says something at least each half second while a command runs

R = TypeVar("R")


class ControlError(Exception):
    """Why a command has no result; ``hint`` says what to do."""

    def __init__(self, error: Error) -> None:
        super().__init__(f"{error.message} ({error.hint})" if error.hint else error.message)
        self.error = error


class Refused(ControlError):
    """ftd answered with an error."""


class NotRunning(ControlError):
    """Nobody listens on the socket."""


class TimedOut(ControlError):
    """ftd was silent, or a drain took longer than it was given."""


class Client:
    """One connection.

    Args:
        path: the control socket.
        timeout_s: longest silence of ftd.
    Raises:
        NotRunning: nobody listens there.
        Refused: it may not be opened by this user.
    """

    def __init__(self, path: Path, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            self._socket.close()
            raise NotRunning(_not_running(path)) from None
        except TimeoutError:
            self._socket.close()
            raise self._timed_out() from None
        except OSError as error:
            self._socket.close()
            raise Refused(_not_opened(path, error)) from None
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def call(
        self, command: Command[R], on_progress: Callable[[Progress], None] = lambda _: None
    ) -> R:
        """Run a command to its end. Raises Refused, NotRunning, TimedOut."""
        self._send(command)
        while True:
            message = self._receive()
            if "progress" in message:
                on_progress(_understand(Progress, message["progress"]))
            else:
                return _result(command, message)

    def stream(self, command: Command[R]) -> Iterator[R]:
        """Results for as long as ftd sends them. Raises Refused, TimedOut."""
        self._send(command)
        while message := self._receive(may_end=True):
            yield _result(command, message)

    def wait_closed(self) -> None:
        """Wait until ftd closes the connection, the last thing it does. Raises TimedOut."""
        while self._receive(may_end=True):
            pass

    def _send(self, command: Command[Any]) -> None:
        try:
            self._socket.sendall(encode_command(command))
        except TimeoutError:
            raise self._timed_out() from None
        except OSError:
            pass  # closed already: what ftd said before can still be read

    def _receive(self, *, may_end: bool = False) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise self._timed_out() from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            if may_end:
                return {}
            raise NotRunning(_ended(self._path))
        try:
            return decode_object(line)
        except Malformed as error:
            raise Refused(_misunderstood(error)) from None

    def _timed_out(self) -> TimedOut:
        return TimedOut(
            Error(
                "timed_out",
                f"ftd on {self._path} was silent for {self._timeout_s:g} s",
                "is it stopped, or the machine overloaded? a larger --timeout waits longer",
            )
        )


def _result(command: Command[R], message: dict[str, Any]) -> R:
    if "error" in message:
        error = _understand(Error, message["error"])
        raise TimedOut(error) if error.code == "timed_out" else Refused(error)
    result: R = _understand(entry_of(command).result, message.get("result"))
    return result


def _understand(cls: type[R], values: Any) -> R:
    try:
        if not isinstance(values, dict):
            raise Malformed(f"an object for {cls.__name__} was expected, {values!r} found")
        return build(cls, values)
    except Malformed as error:
        raise Refused(_misunderstood(error)) from None


def _misunderstood(error: Malformed) -> Error:
    return Error(
        "protocol", f"ftd's answer was not understood: {error}", "are both of one version?"
    )


def _ended(path: Path) -> Error:
    return Error("not_running", f"ftd on {path} ended before it answered", "its log says why")


def _not_running(path: Path) -> Error:
    return Error(
        "not_running",
        f"ftd is not running: nobody listens on {path}",
        "start it with: ftd, or name its socket with --socket or FTD_SOCKET",
    )


def _not_opened(path: Path, error: OSError) -> Error:
    denied = isinstance(error, PermissionError)
    return Error(
        "socket_unusable",
        f"{path} cannot be opened: {error.strerror or error}",
        "only the user that ftd runs as, and root, may use it"
        if denied
        else "name the socket of a running ftd with --socket or FTD_SOCKET",
    )
