"""The file of the control socket: mode 0600, one daemon, never somebody else's file removed."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftd.errors import AddressInUse, ConfigError

PROBE_TIMEOUT_S = 1.0
BACKLOG = 32


class SocketFile:
    """A listening Unix socket and its file.

    Raises:
        AddressInUse: another process answers there.
        ConfigError: the place cannot hold a socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _make_directory(path.parent)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _alone_in(path.parent):  # two daemons must not both find the same stale socket
                _remove_stale(path)
                os.fchmod(self.socket.fileno(), 0o600)  # Linux gives the file this mode: no gap
                self.socket.bind(str(path))
                os.chmod(path, 0o600)
                self.socket.listen(BACKLOG)
                self._identity = _identity(path)
        except OSError as error:
            self.socket.close()
            raise _unusable(path, error) from error
        except BaseException:
            self.socket.close()
            raise

    def remove(self) -> None:
        """Take the file away unless it has become another daemon's; idempotent."""
        try:
            if _identity(self.path) == self._identity:
                self.path.unlink()
        except OSError:
            pass  # gone already, with its directory perhaps


def _make_directory(directory: Path) -> None:
    """Create the last folder, 0700, if it is missing; one that exists stays as it is."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(directory, error) from error


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"--socket {path}: there is a file there that is not a socket",
            hint="it was left alone; name another path",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass  # somebody is there and too busy to answer
    raise AddressInUse(
        f"--socket {path}: another ftd listens there",
        hint="ftctl stop ends it; --socket and --http start a second one beside it",
    )


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--socket: {path} cannot be used: {error.strerror or error}",
        hint="name a path in a directory you may write to: --socket ~/.ftd/ftd.sock",
    )
