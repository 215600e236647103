"""The server against real sockets, with commands that do what the test says."""

import asyncio
import json
import os
import socket
import stat
import threading
from contextlib import asynccontextmanager

import pytest

from ftd.control import lines
from ftd.control import protocol as p
from ftd.control.client import Client, NotRunning, Refused, TimedOut
from ftd.control.server import MAX_CLIENTS, ControlServer
from ftd.control.socket_file import SocketFile
from ftd.errors import AddressInUse, BudgetExceeded, ConfigError
from ftd.errors import TimedOut as CommandTimedOut


class Scripted:
    """Commands: ``check`` waits for ``gate``, ``reload`` and ``drain`` refuse, ``stop`` breaks."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.padding = ""
        self.streams = 0

    async def run(self, command):
        match command:
            case p.Health():
                return p.HealthResult("ready", True, None)
            case p.Check():
                await self.gate.wait()
                return p.CheckResult("b", (), 1, 2, True)
            case p.Reload():
                raise BudgetExceeded("2 GiB needed, 1 GiB free", hint="use a smaller model")
            case p.Drain():
                raise CommandTimedOut("3 requests are left")
        raise ZeroDivisionError("oops")

    async def stream(self, command):
        self.streams += 1
        try:
            while True:
                yield p.StatusResult(
                    version="1",
                    pid=1,
                    uptime_s=0.0,
                    state="ready",
                    ready=True,
                    cause=self.padding,
                    last_failure=None,
                    model=None,
                    path=None,
                    http="",
                    rss_bytes=0,
                )
                await asyncio.sleep(command.interval_s)
        finally:
            self.streams -= 1

    def progress(self):
        return p.Progress("reading weights", 1, 4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "ftd.sock"


@asynccontextmanager
async def serving(path, **options):
    commands = Scripted()
    server = ControlServer(path, commands, **options)
    await server.start()
    try:
        yield commands
    finally:
        await server.close()


async def in_thread(work):
    return await asyncio.to_thread(work)


def call(path, command, timeout_s=5.0):
    with Client(path, timeout_s) as client:
        return client.call(command)


class TestCommands:
    async def test_answer(self, path):
        async with serving(path):
            assert await in_thread(lambda: call(path, p.Health())) == p.HealthResult(
                "ready", True, None
            )

    async def test_many_commands_on_one_connection(self, path):
        def talk():
            with Client(path) as client:
                return [client.call(p.Health()).ready for _ in range(5)]

        async with serving(path):
            assert await in_thread(talk) == [True] * 5

    async def test_error_of_a_command_reaches_the_client_whole(self, path):
        async with serving(path):
            with pytest.raises(Refused) as refusal:
                await in_thread(lambda: call(path, p.Reload()))
        error = refusal.value.error
        assert error == p.Error(
            "budget_exceeded", "2 GiB needed, 1 GiB free", "use a smaller model"
        )

    async def test_command_out_of_time_is_its_own_error(self, path):
        async with serving(path):
            with pytest.raises(TimedOut, match="3 requests are left"):
                await in_thread(lambda: call(path, p.Drain()))

    async def test_fault_of_ours_is_told_and_the_connection_lives(self, path):
        def talk():
            with Client(path) as client:
                with pytest.raises(Refused, match="oops") as refusal:
                    client.call(p.Stop())
                return refusal.value.error.code, client.call(p.Health()).ready

        async with serving(path):
            assert await in_thread(talk) == ("internal_error", True)

    async def test_progress_is_told_while_a_command_runs(self, path, monkeypatch):
        monkeypatch.setattr("ftd.control.server.PROGRESS_S", 0.01)
        async with serving(path) as commands:
            loop, seen = asyncio.get_running_loop(), []

            def told(progress):
                seen.append(progress)
                if len(seen) == 3:
                    loop.call_soon_threadsafe(commands.gate.set)

            def talk():
                with Client(path) as client:
                    return client.call(p.Check(), told)

            result = await in_thread(talk)
        assert result.model == "b"
        assert seen[:3] == [p.Progress("reading weights", 1, 4)] * 3

    async def test_stream_until_the_client_leaves(self, path):
        def watch():
            with Client(path) as client:
                stream = client.stream(p.Watch(0.001))
                return [next(stream).state for _ in range(5)]

        async with serving(path) as commands:
            assert await in_thread(watch) == ["ready"] * 5
            async with asyncio.timeout(5):
                while commands.streams:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)

    async def test_several_clients_at_once(self, path):
        async with serving(path) as commands:
            waiting = asyncio.create_task(in_thread(lambda: call(path, p.Check())))
            for _ in range(3):
                assert (await in_thread(lambda: call(path, p.Health()))).ready
            commands.gate.set()
            assert (await waiting).model == "b"


class TestClients:
    """What bad clients get."""

    async def raw(self, path):
        return await asyncio.open_unix_connection(str(path))

    async def test_malformed_line_is_answered_and_the_next_one_obeyed(self, path):
        async with serving(path):
            reader, writer = await self.raw(path)
            writer.write(b'{"command": "nix"}\n' + lines.encode_command(p.Health()))
            assert json.loads(await reader.readline())["error"]["code"] == "malformed"
            assert json.loads(await reader.readline())["result"]["ready"] is True
            writer.close()

    async def test_line_too_long_is_cut(self, path):
        async with serving(path):
            reader, writer = await self.raw(path)
            writer.write(b"x" * (lines.LIMIT_BYTES + 10))
            error = json.loads(await reader.readline())["error"]
            assert "65536 bytes" in error["message"]
            assert await reader.read() == b""
            writer.close()

    async def test_silent_client_is_cut(self, path):
        async with serving(path, silence_s=0.02):
            reader, writer = await self.raw(path)
            assert await reader.read() == b""
            writer.close()

    async def test_half_a_line_is_nothing(self, path):
        async with serving(path):
            reader, writer = await self.raw(path)
            writer.write(b'{"command": "he')
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()

    async def test_client_that_does_not_read_is_cut(self, path):
        async with serving(path, write_timeout_s=0.05) as commands:
            commands.padding = "x" * 100_000
            with socket.socket(socket.AF_UNIX) as deaf:
                deaf.connect(str(path))
                deaf.sendall(lines.encode_command(p.Watch(0.0)))
                async with asyncio.timeout(5):
                    while not commands.streams:  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
                    while commands.streams:  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
            assert (await in_thread(lambda: call(path, p.Health()))).ready

    async def test_client_that_leaves_during_a_command_does_no_harm(self, path, monkeypatch):
        monkeypatch.setattr("ftd.control.server.PROGRESS_S", 0.01)
        async with serving(path) as commands:
            with socket.socket(socket.AF_UNIX) as hasty:
                hasty.connect(str(path))
                hasty.sendall(lines.encode_command(p.Check()))
            await asyncio.sleep(0.05)
            commands.gate.set()
            assert (await in_thread(lambda: call(path, p.Health()))).ready

    async def test_other_users_are_refused(self, path):
        async with serving(path, allowed_uids=frozenset({os.geteuid() + 1})):
            with pytest.raises(Refused, match=f"user {os.geteuid()} may not control this ftd"):
                await in_thread(lambda: call(path, p.Health()))

    async def test_too_many_clients_are_told(self, path):
        async with serving(path):
            crowd = [await self.raw(path) for _ in range(MAX_CLIENTS)]
            with pytest.raises(Refused, match="32 clients are connected"):
                await in_thread(lambda: call(path, p.Health()))
            for _, writer in crowd:
                writer.close()

    async def test_close_ends_connections_and_removes_the_file(self, path):
        server = ControlServer(path, Scripted())
        await server.start()
        reader, writer = await self.raw(path)
        writer.write(lines.encode_command(p.Health()))
        await reader.readline()
        await server.close()
        assert await reader.read() == b""
        assert not path.exists()
        writer.close()


class TestSocketFile:
    def test_mode_and_directory(self, path):
        old = os.umask(0)
        try:
            file = SocketFile(path)
        finally:
            os.umask(old)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        file.socket.close()

    def test_directory_that_exists_stays_as_it_is(self, tmp_path):
        tmp_path.chmod(0o755)
        file = SocketFile(tmp_path / "s")
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
        file.socket.close()

    def test_stale_socket_is_taken_over(self, path):
        SocketFile(path).socket.close()  # as after a crash: the file stays
        assert path.exists()
        file = SocketFile(path)
        file.socket.close()

    def test_another_daemon_is_respected(self, path):
        first = SocketFile(path)
        with pytest.raises(AddressInUse, match="another ftd listens there"):
            SocketFile(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        first.socket.close()

    def test_only_one_of_many_that_start_at_once_gets_it(self, path):
        SocketFile(path).socket.close()
        got, refused, go = [], [], threading.Barrier(8)

        def start():
            go.wait()
            try:
                got.append(SocketFile(path))
            except AddressInUse as error:
                refused.append(error)

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(got), len(refused)) == (1, 7)
        got[0].socket.close()

    def test_a_file_that_is_no_socket_is_left_alone(self, path):
        path.parent.mkdir()
        path.write_text("precious")
        with pytest.raises(ConfigError, match="not a socket"):
            SocketFile(path)
        assert path.read_text() == "precious"

    def test_place_that_cannot_be_written(self, tmp_path):
        with pytest.raises(ConfigError, match="No such file or directory"):
            SocketFile(tmp_path / "no" / "such" / "ftd.sock")

    def test_remove_spares_the_file_of_a_successor(self, path):
        first = SocketFile(path)
        path.unlink()
        second = SocketFile(path)
        first.remove()
        assert path.exists()
        second.remove()
        second.remove()
        assert not path.exists()
        first.socket.close()
        second.socket.close()


class TestClientAlone:
    def test_nobody_listens(self, tmp_path):
        with pytest.raises(NotRunning, match=f"nobody listens on {tmp_path}/s") as error:
            Client(tmp_path / "s")
        assert "start it with: ftd" in error.value.error.hint

    def test_stale_file(self, path):
        SocketFile(path).socket.close()
        with pytest.raises(NotRunning):
            Client(path)

    @pytest.mark.parametrize(
        ("answer", "error", "text"),
        [
            (b"", NotRunning, "ended before it answered"),
            (b'{"result": {"ready": tr', NotRunning, "ended before it answered"),
            (b"hello\n", Refused, "not understood"),
            (b'{"result": {"ready": "yes"}}\n', Refused, "not understood"),
            (b'{"news": 1}\n', Refused, "not understood"),
            (None, TimedOut, "silent for 0.05 s"),
        ],
    )
    def test_odd_servers(self, path, answer, error, text):
        file = SocketFile(path)
        done = threading.Event()

        def answer_once():
            connection, _ = file.socket.accept()
            connection.recv(1000)
            if answer is None:
                done.wait(5)
            else:
                connection.sendall(answer)
            connection.close()

        thread = threading.Thread(target=answer_once)
        thread.start()
        with pytest.raises(error, match=text):
            call(path, p.Health(), 0.05 if answer is None else 5.0)
        done.set()
        thread.join()
        file.socket.close()
