"""Tell systemd how the daemon stands (``sd_notify``); without systemd every call does nothing.

One datagram of ``KEY=value`` lines to the socket that NOTIFY_SOCKET names: a path, or ``@name`` in
the abstract namespace. Source: sd_notify(3), "Notes" on the protocol.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

import structlog

log = structlog.get_logger(__name__)

SEND_TIMEOUT_S = 0.1  # systemd reads at once; a full socket must not hold the event loop


class Notifier:
    """Sends to one notify socket.

    Args:
        address: of the notify socket; None: nobody listens.
        watchdog_s: systemd kills a service that does not feed it for so long; None: no watchdog.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = f"\0{address[1:]}" if address and address[0] == "@" else address
        self._last_status = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Notifier:
        """What systemd has put into the environment of a ``Type=notify`` service."""
        micros = environ.get("WATCHDOG_USEC", "")
        ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return cls(
            environ.get("NOTIFY_SOCKET") or None,
            int(micros) / 1e6 if micros.isdecimal() and int(micros) and ours else None,
        )

    def ready(self) -> None:
        self._send("READY=1")

    def reloading(self) -> None:
        """A reload has begun; ``ready`` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``; sent only when it has changed."""
        line = " ".join(text.split())
        if line != self._last_status:
            self._last_status = line
            self._send(f"STATUS={line}")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.settimeout(SEND_TIMEOUT_S)
                channel.connect(self._address)
                channel.sendall(message.encode())
        except OSError as error:
            log.warning("systemd.unreachable", address=self._address, error=str(error))
