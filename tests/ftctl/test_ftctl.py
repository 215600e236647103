"""ftctl as a person or a script meets it: a real socket, a lifecycle with scripted models."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import structlog
from click.testing import CliRunner
from scripted_models import Script, ScriptedModels

from ftctl import view
from ftctl.cli import main
from ftctl.live import Bar, Screen
from ftd.config import Config
from ftd.control import protocol as p
from ftd.control.commands import LifecycleCommands
from ftd.control.server import ControlServer
from ftd.engine.api import EngineRequest
from ftd.errors import CheckpointError
from ftd.lifecycle import Lifecycle

PLAIN = view.Paint(False)


class Daemon:
    """Control socket and lifecycle on a thread with a loop of its own."""

    def __init__(self, path, models):
        self.path, self.models = path, models
        self.began, self.ended = threading.Event(), None
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        self.thread.start()
        assert self.began.wait(10)

    async def serve(self):
        self.loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
        self.lifecycle = Lifecycle(Config(model="a"), self.models)
        commands = LifecycleCommands(self.lifecycle, stop=self.ended.set)
        commands.http = "http://127.0.0.1:1919"
        server = ControlServer(self.path, commands)
        await server.start()
        await self.lifecycle.load()
        self.began.set()
        await self.ended.wait()
        await self.lifecycle.stop(0.0)
        await server.close()

    def end(self):
        with suppress(RuntimeError):  # the loop is closed: it has ended by itself
            self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join(10)

    def submit(self, request):
        async def submit():
            return self.lifecycle.current().engine.submit(request)

        return asyncio.run_coroutine_threadsafe(submit(), self.loop).result(5)


@contextmanager
def running(path, **scripts):
    daemon = Daemon(path, ScriptedModels(**{"a": Script(engine={"slots": 8}), **scripts}))
    try:
        yield daemon
    finally:
        daemon.end()


@pytest.fixture(autouse=True)
def quiet():
    """The daemon shares the process: its log must not mix with what ftctl prints."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ftd.sock"


@pytest.fixture
def ftctl(path):
    def call(*words, env=None):
        return CliRunner().invoke(main, list(words), env={"FTD_SOCKET": str(path), **(env or {})})

    return call


class TestCommands:
    def test_status(self, path, ftctl):
        with running(path):
            done = ftctl("status")
        assert done.exit_code == 0 and done.stderr == ""
        rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
        assert rows["state"] == "ready"
        assert rows["model"] == "a from /models/a"
        assert rows["limits"] == "context 64, pool 128 tokens, 4 running, 8 waiting"
        assert rows["experts"] == "4 of 8 slots, 75% hits"
        assert rows["speed"] == "decode 240.0 tok/s, prefill 0.0 tok/s, step 8.30 ms"
        assert all(len(line) <= 80 for line in done.stdout.splitlines())
        assert "\x1b" not in done.stdout

    def test_a_pool_that_follows_need_is_shown_as_it_is(self, path, ftctl):
        with running(path) as daemon:
            engine = daemon.lifecycle.current().engine
            engine.limits = replace(engine.limits, pool_tokens=4096)
            shown = ftctl("status").stdout
        assert "context 64, pool 128 tokens (up to 4,096), 4 running" in shown

    @pytest.mark.parametrize("words", [("--json", "status"), ("status", "--json")])
    def test_json_before_or_after(self, path, ftctl, words):
        with running(path):
            done = ftctl(*words)
        facts = json.loads(done.stdout)
        assert facts["state"] == "ready" and facts["engine"]["expert_hits"] == 3
        assert done.stdout.count("\n") == 1

    @pytest.mark.parametrize("before", [True, False])
    def test_socket_flag_wins_over_the_variable(self, path, ftctl, before):
        words = ("--socket", str(path), "health") if before else ("health", "--socket", str(path))
        with running(path):
            assert ftctl(*words, env={"FTD_SOCKET": "/nowhere"}).stdout == "ready\n"

    def test_requests_and_cancel(self, path, ftctl):
        with running(path, a=Script(engine={"step_s": 0.005})) as daemon:
            assert ftctl("requests").stdout == "no requests\n"
            daemon.submit(EngineRequest("chatcmpl-7", (1, 2, 3), max_tokens=100_000))
            lines = ftctl("requests").stdout.splitlines()
            assert re.match(r"request +state +prompt +reused +out +age$", lines[0])
            assert re.match(r"chatcmpl-7 +decode +3/3 +2 ", lines[1])
            assert ftctl("cancel", "chatcmpl-7").stdout == "chatcmpl-7 cancelled\n"
            done = ftctl("cancel", "chatcmpl-7")
        assert (done.exit_code, done.stdout) == (1, "")
        assert "no request 'chatcmpl-7'" in done.stderr and "ftctl requests" in done.stderr

    def test_experts(self, path, ftctl):
        with running(path, b=Script()):
            assert "hits      75% of 4 look-ups" in ftctl("experts").stdout
            ftctl("reload", "b")
            done = ftctl("experts")
        assert done.exit_code == 1 and "--expert-slots" in done.stderr

    def test_check(self, path, ftctl):
        broken = Script(refusal=CheckpointError("tensor x: [3] expected, [4] found"))
        with running(path, broken=broken):
            good, bad = ftctl("check"), ftctl("check", "broken")
        assert good.exit_code == 0
        assert good.stdout.splitlines()[0] == "weights  1.00 GiB"
        assert "a can be loaded while the old one serves: 1.00 GiB of 1.00 TiB" in good.stdout
        assert (bad.exit_code, bad.stdout) == (1, "")
        assert "[3] expected, [4] found" in bad.stderr

    def test_reload_beside(self, path, ftctl):
        with running(path, b=Script()):
            done = ftctl("reload", "b")
            assert ftctl("health").exit_code == 0
        assert re.match(r"a -> b, loaded in [\d.]+ m?s, no pause\n$", done.stdout)

    def test_reload_after_cut(self, path, ftctl):
        b = Script(beside=False)
        with running(path, b=b):
            done = ftctl("reload", "b", "--cut", "--json")
        facts = json.loads(done.stdout)
        assert facts["was"] == "a" and facts["beside"] is False and facts["unready_s"] > 0

    def test_reload_that_fails_late_says_who_serves(self, path, ftctl):
        b = Script(beside=False, failures=deque([OSError("disk on fire")]))
        with running(path, b=b):
            done = ftctl("reload", "b")
            status = ftctl("status").stdout
        assert (done.exit_code, done.stdout.strip()) == (1, "")
        assert "disk on fire" in done.stderr and "a was loaded again" in done.stderr
        assert "failure   loading b failed" in status

    def test_reload_shows_progress_on_stderr(self, path, ftctl, monkeypatch):
        monkeypatch.setattr("ftd.control.server.PROGRESS_S", 0.01)
        with running(path, b=Script(piece_s=0.05)):
            done = ftctl("reload", "b")
        assert "reading weights\n" in done.stderr

    def test_reload_of_a_directory_is_seen_from_here(self, path, ftctl, tmp_path, monkeypatch):
        (tmp_path / "model").mkdir()
        monkeypatch.chdir(tmp_path)
        with running(path):
            assert f"--model {tmp_path}/model" in ftctl("reload", "model").stderr
            assert "--model demo/x" in ftctl("reload", "demo/x").stderr

    def test_drain_out_of_time_then_cut(self, path, ftctl):
        with running(path, a=Script(engine={"step_s": 0.01})) as daemon:
            daemon.submit(EngineRequest("r", (1,), max_tokens=100_000))
            done = ftctl("drain", "--timeout", "50ms")
            assert done.exit_code == 4
            assert "1 running and 0 waiting requests are left after 0.05 s" in done.stderr
            health = ftctl("health")
            assert health.exit_code == 1 and "being drained" in health.stdout
            assert ftctl("reload", "--cut").exit_code == 0
            assert re.match(r"a drained in ", ftctl("drain").stdout)

    def test_drain_of_an_unloaded_model_says_that_there_is_nothing_to_do(self, path, ftctl):
        with running(path) as daemon:
            unload = daemon.lifecycle.unload()
            asyncio.run_coroutine_threadsafe(unload, daemon.loop).result(5)
            done = ftctl("drain")
            assert json.loads(ftctl("drain", "--json").stdout)["unloaded"] is True
            assert str(daemon.lifecycle.state) == "unloaded"
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout == "a is unloaded: nothing to drain; the next request loads it\n"

    def test_budget(self, path, ftctl):
        with running(path):
            shown = ftctl("budget")
            assert shown.stdout == "KV pool    1.00 MiB\n"
            done = ftctl("budget", "--expert-slots", "4")
            assert done.stdout == (
                "slots 8 -> 4, KV tokens 128 as before, paused 38.4 ms, 2 experts evicted, "
                "1 sequences put off\n"
            )
            facts = json.loads(ftctl("budget", "--auto", "--json").stdout)
            assert facts["auto"] and facts["paused_ms"] == 38.4 and facts["slots"] == 4
            by_need = "divided by need, KV tokens up to 128"
            assert ftctl("budget").stdout.splitlines()[-1] == by_need
            ended = ftctl("budget", "--kv-tokens", "128").stdout
            assert ended.splitlines()[-1] == "no longer divided by need"
            assert "context" not in ended
            assert ", context 64 -> 32, paused" in ftctl("budget", "--kv-tokens", "32").stdout

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--expert-slots", "9"), "use --expert-slots 8"),
            (("--vram", "much"), "--vram much: expected a size"),
            (("--kv-tokens", "7"), "--kv-tokens 7: expected a whole number from 16"),
        ],
    )
    def test_budget_refused(self, path, ftctl, words, said):
        with running(path):
            done = ftctl("budget", *words)
        assert (done.exit_code, done.stdout) == (1, "")
        assert said in done.stderr

    def test_launch_refuses_a_context_that_is_too_small(self, path, ftctl):
        with running(path):
            done = ftctl("launch", "claude", "--dry-run", "--", "-p", "hi")
        assert (done.exit_code, done.stdout) == (1, "")
        assert "20,392 tokens" in done.stderr and "a has 64" in done.stderr

    def test_stop_waits_for_the_end(self, path, ftctl):
        with running(path):
            assert ftctl("stop").stdout == f"ftd stopped (pid {os.getpid()})\n"
            assert not path.exists()
            assert ftctl("status").exit_code == 3

    def test_watch_into_a_pipe_ends_with_ftd(self, path, ftctl):
        with running(path) as daemon:
            lines = []
            thread = threading.Thread(
                target=lambda: lines.append(ftctl("watch", "--interval", "50ms"))
            )
            thread.start()
            threading.Event().wait(0.2)
            daemon.end()
            thread.join(10)
        (done,) = lines
        first = done.stdout.splitlines()[0]
        assert first.startswith("ready model=a running=0 waiting=0 decode_tok_s=120.5")
        assert first.endswith("pages=4/16 slots=4/8 hits=75%")
        assert done.exit_code == 0 and "ftd has ended" in done.stderr

    @pytest.mark.parametrize("interval", ["0", "2m"])
    def test_watch_refuses_an_interval_by_the_name_of_its_flag(self, path, ftctl, interval):
        with running(path):
            done = ftctl("watch", "--interval", interval)
        assert done.exit_code == 2
        assert f"'--interval': expected from 50ms to 1m, found {interval}" in done.stderr


class TestExitCodes:
    def test_a_path_no_socket_can_have_is_not_taken_for_a_lack_of_rights(self, ftctl):
        done = ftctl("--socket", "/tmp/" + "a" * 200, "status")
        assert done.exit_code == 1
        assert "cannot be opened" in done.stderr and "root" not in done.stderr

    def test_not_running_names_the_socket_and_what_to_do(self, path, ftctl):
        for words in (["status"], ["reload", "x"], ["stop"], ["watch"], ["drain"]):
            done = ftctl(*words)
            assert (done.exit_code, done.stdout) == (3, ""), words
            assert f"nobody listens on {path}" in done.stderr
            assert "start it with: ftd" in done.stderr

    @pytest.mark.parametrize("words", [("--json", "status"), ("status", "--json")])
    def test_errors_are_json_too(self, ftctl, words):
        done = ftctl(*words)
        assert json.loads(done.stderr)["error"]["code"] == "not_running"

    @pytest.mark.parametrize(
        "words", [(), ("nix",), ("cancel",), ("status", "--timeout", "soon"), ("status", "x")]
    )
    def test_usage(self, ftctl, words):
        assert ftctl(*words).exit_code == 2

    def test_silent_ftd_is_a_time_out(self, path, ftctl):
        import socket

        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(path))
            silent.listen()
            done = ftctl("status", "--timeout", "50ms")
        assert done.exit_code == 4 and "was silent for 0.05 s" in done.stderr


def test_starts_without_torch_and_aiohttp():
    heavy = "{'torch', 'aiohttp', 'numpy', 'asyncio', 'structlog'}"
    probe = f"import sys, ftctl.cli; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


class TestViews:
    @pytest.mark.parametrize(
        ("tty", "environ", "on"),
        [
            (True, {}, True),
            (False, {}, False),
            (True, {"NO_COLOR": "1"}, False),
            (True, {"TERM": "dumb"}, False),
        ],
    )
    def test_colours_where_wanted(self, monkeypatch, tty, environ, on):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        paint = view.Paint.of(type("Stream", (), {"isatty": lambda self: tty})())
        assert (paint("x", view.RED) != "x") is on

    def test_screen_gives_the_terminal_back(self, capsys):
        with Screen(sys.stdout) as screen:
            screen.draw(lambda columns, rows: ["one", "two"])
        out = capsys.readouterr().out
        assert out.startswith("\x1b[?1049h") and out.endswith("\x1b[?1049l")
        assert "\x1b[?2026h\x1b[Hone\x1b[K\r\ntwo\x1b[K\x1b[J\x1b[?2026l" in out

    def test_bar_tells_each_phase_once_where_nothing_moves(self, capsys):
        with Bar(sys.stderr) as bar:
            for phase in ["checking", "reading weights", "reading weights", "warming up"]:
                bar.draw(p.Progress(phase))
        assert capsys.readouterr().err == "checking\nreading weights\nwarming up\n"

    def test_draining_shows_what_is_left(self):
        assert view.progress(p.Progress("draining", running=2, waiting=1), 80) == (
            "draining, 2 running, 1 waiting"
        )
