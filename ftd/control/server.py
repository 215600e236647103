"""The control socket: reads commands, sends what they bring, cuts clients that are slow or silent.

Several clients at once; each has one task, and one command runs at a time on a connection. While a
command takes long its client is told of the progress. What a client says is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

import structlog

from ftd.control.lines import LIMIT_BYTES, Malformed, decode_command, encode
from ftd.control.protocol import Command, Error, Progress, entry_of
from ftd.control.socket_file import SocketFile
from ftd.errors import FtdError
from ftd.lifecycle.beside import cancel_all

log = structlog.get_logger(__name__)

MAX_CLIENTS = 32
SILENCE_S = 30.0  # between two commands of a client
WRITE_TIMEOUT_S = 5.0  # a client that does not read for so long is cut
PROGRESS_S = 0.25  # between two reports while a command runs
WRITE_BUFFER_BYTES = 64 * 1024


class Commands(Protocol):
    """What the commands do; ``ftd.control.commands``, or a fake."""

    async def run(self, command: Command[Any]) -> Any: ...
    def stream(self, command: Command[Any]) -> AsyncGenerator[Any, None]: ...
    def progress(self) -> Progress: ...


class ControlServer:
    """Serves ``commands`` on a Unix socket between ``start`` and ``close``.

    Raises:
        AddressInUse: another daemon answers there.
        ConfigError: the path cannot be used.
    """

    def __init__(
        self,
        path: Path,
        commands: Commands,
        *,
        silence_s: float = SILENCE_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        allowed_uids: frozenset[int] | None = None,
    ) -> None:
        self._commands = commands
        self._silence_s = silence_s
        self._write_timeout_s = write_timeout_s
        self._allowed_uids = allowed_uids or frozenset({os.geteuid(), 0})
        self._clients: set[asyncio.Task[None]] = set()
        self._file = SocketFile(path)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(
            self._connected, sock=self._file.socket, limit=LIMIT_BYTES
        )

    async def close(self) -> None:
        """Remove the file, then close every connection."""
        self._file.remove()
        if self._server:
            self._server.close()
        self._file.socket.close()
        await cancel_all(*self._clients)

    def remove_file(self) -> None:
        """For an end without ``close``; from any thread."""
        self._file.remove()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._client(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        try:
            if refusal := self._refusal(writer):
                log.warning("control.client_refused", code=refusal.code, cause=refusal.message)
                await self._send(writer, error=refusal)
                return
            while line := await self._read_line(reader, writer):
                await self._obey(line, writer)
        except TimeoutError:
            log.warning("control.client_cut", cause="it did not read its answer")
            writer.transport.abort()
        except ConnectionError:
            pass  # it left: whatever it began goes on
        finally:
            writer.close()

    def _refusal(self, writer: asyncio.StreamWriter) -> Error | None:
        uid = _peer_uid(writer)
        if uid not in self._allowed_uids:
            return Error("not_allowed", f"user {uid} may not control this ftd")
        if len(self._clients) > MAX_CLIENTS:
            return Error("too_many_clients", f"{MAX_CLIENTS} clients are connected", "retry")
        return None

    async def _read_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The next command; empty when the client is done or has been silent for too long."""
        try:
            async with asyncio.timeout(self._silence_s):
                return await reader.readuntil(b"\n")
        except (asyncio.IncompleteReadError, TimeoutError):
            return b""
        except asyncio.LimitOverrunError:
            message = f"a line is longer than {LIMIT_BYTES} bytes"
            await self._send(writer, error=Error("malformed", message))
            return b""

    async def _obey(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            command = decode_command(line)
        except Malformed as error:
            await self._send(writer, error=Error("malformed", str(error)))
            return
        try:
            if entry_of(command).stream:
                async with aclosing(self._commands.stream(command)) as results:
                    async for result in results:
                        await self._send(writer, result=result)
            else:
                await self._send(writer, result=await self._run(command, writer))
        except FtdError as error:
            await self._send(writer, error=Error(error.code, error.message, error.hint))
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            log.exception("control.command_failed", command=entry_of(command).name)
            hint = "this is a fault of ftd; its log has the traceback"
            await self._send(writer, error=Error("internal_error", repr(error), hint))

    async def _run(self, command: Command[Any], writer: asyncio.StreamWriter) -> Any:
        task = asyncio.ensure_future(self._commands.run(command))
        try:
            while not (await asyncio.wait({task}, timeout=PROGRESS_S))[0]:
                await self._send(writer, progress=self._commands.progress())
            return task.result()
        finally:
            await cancel_all(task)

    async def _send(self, writer: asyncio.StreamWriter, **message: Any) -> None:
        writer.write(encode(message))
        async with asyncio.timeout(self._write_timeout_s):
            await writer.drain()


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    fileno = os.dup(writer.get_extra_info("socket").fileno())
    with socket.socket(fileno=fileno) as peer:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return int(uid)
