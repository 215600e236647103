"""What systemd and a terminal are told; clock and lifecycle are the test's."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from ftd.lifecycle import Phase, Progress, State
from ftd.pulse import Pulse, bar, describe


class Told:
    """A notifier that keeps what it was told."""

    def __init__(self, watchdog_s=None):
        self.watchdog_s = watchdog_s
        self.messages = []

    def __getattr__(self, name):
        return lambda *args: self.messages.append((name, *args))


class FakeLifecycle:
    def __init__(self, state=State.READY, ready=True, progress=None):
        self.state, self.ready, self.progress = state, ready, progress
        self.heartbeat = 1

    def current(self):
        return SimpleNamespace(name="demo")

    def health(self):
        return {"cause": f"the model is loading: {self.progress}"}


class Terminal:
    terminal = True

    def __init__(self):
        self.pinned = []

    def pin(self, text):
        self.pinned.append(text)


def pulse(lifecycle, told, clock=lambda: 0.0, writer=None):
    writer = writer or SimpleNamespace(terminal=False)
    return Pulse(lifecycle, told, writer, "http://127.0.0.1:1919", clock=clock)


def test_watchdog_is_fed_only_if_the_heart_beats():
    now = [0.0]
    lifecycle, told = FakeLifecycle(), Told(watchdog_s=8.0)
    beating = pulse(lifecycle, told, lambda: now[0])

    def feeds():
        count = told.messages.count(("watchdog",))
        told.messages.clear()
        return count

    beating.beat()
    assert feeds() == 1
    lifecycle.heartbeat += 1
    now[0] = 1.9
    beating.beat()
    assert feeds() == 0, "a quarter of the time is soon enough"
    now[0] = 2.0
    beating.beat()
    assert feeds() == 1
    for now[0] in (4.0, 6.0, 100.0):
        beating.beat()
    assert feeds() == 0, "an engine that hangs is not alive"
    lifecycle.heartbeat += 1
    beating.beat()
    assert feeds() == 1


def test_no_watchdog_without_a_time():
    told = Told()
    pulse(FakeLifecycle(), told).beat()
    assert ("watchdog",) not in told.messages


def test_reloading_is_told_once_and_ended_by_ready():
    lifecycle, told = FakeLifecycle(), Told()
    beating = pulse(lifecycle, told)
    for state in (State.READY, State.RELOADING, State.RELOADING, State.FAILED, State.READY):
        lifecycle.state = state
        beating.beat()
    assert [m[0] for m in told.messages if m[0] != "status"] == ["reloading", "ready"]


def test_status_lines():
    http = "http://127.0.0.1:1919"
    assert describe(FakeLifecycle(), http) == f"Serving demo at {http}"
    reading = Progress(Phase.READING, 0.0, 512, 1024)
    loading = FakeLifecycle(State.LOADING, ready=False, progress=reading)
    assert (
        describe(loading, http) == "Loading: the model is loading: reading weights, 50% of 1.00 KiB"
    )
    reloading = FakeLifecycle(State.RELOADING, progress=reading)
    assert describe(reloading, http).endswith("; reloading: reading weights, 50% of 1.00 KiB")


def test_bar_on_a_terminal_goes_with_the_progress():
    lifecycle, terminal = FakeLifecycle(progress=Progress(Phase.READING, 0.0, 1, 4)), Terminal()
    beating = pulse(lifecycle, Told(), writer=terminal)
    beating.beat()
    lifecycle.progress = None
    beating.beat()
    assert terminal.pinned[0].startswith("reading weights [#######----")
    assert terminal.pinned[1] == ""


@pytest.mark.parametrize("done", [0, 1, 2**39, 2**40])
def test_bar_fits_eighty_columns(done):
    assert len(bar(Progress(Phase.READING, 0.0, done, 2**40))) < 80
    assert bar(Progress(Phase.WARMING_UP, 0.0)) == "warming up ..."


def test_a_log_line_every_few_seconds_of_an_operation():
    now = [0.0]
    with structlog.testing.capture_logs() as lines:
        lifecycle = FakeLifecycle()
        beating = pulse(lifecycle, Told(), lambda: now[0])
        beating.beat()
        lifecycle.progress = Progress(Phase.READING, 0.0, 1, 4)
        for now[0] in (1.0, 4.9, 5.0, 9.0):
            beating.beat()
        lifecycle.progress = Progress(Phase.WARMING_UP, 9.0)
        now[0] = 10.0
        beating.beat()
    assert [line["phase"] for line in lines] == ["reading weights", "warming up"]


UNITS = Path(__file__).parents[2] / "systemd"


@pytest.mark.parametrize("unit", ["ftd.service", "ftd-user.service"])
def test_units_promise_what_the_daemon_keeps(unit):
    text = (UNITS / unit).read_text()
    keys = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] != "#")
    assert keys["Type"] == "notify" and keys["NotifyAccess"] == "main"
    assert int(keys["WatchdogSec"]) > 0 and int(keys["TimeoutStopSec"]) > 5
    assert keys["ExecReload"].endswith("/ftctl reload")
    assert keys["RestartPreventExitStatus"] == "2"
    assert "PrivateDevices" not in keys and "MemoryDenyWriteExecute" not in keys


def test_system_unit_lets_a_gpu_through():
    text = (UNITS / "ftd.service").read_text()
    assert "LimitMEMLOCK=infinity" in text and "DeviceAllow=char-nvidia rw" in text
    assert "RuntimeDirectory=ftd" in text and "StateDirectory=ftd" in text


@pytest.mark.parametrize(
    ("unit", "manager"), [("ftd.service", []), ("ftd-user.service", ["--user"])]
)
def test_units_are_well_formed(unit, manager, tmp_path):
    import shutil
    import subprocess

    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd on this machine")
    lines = (UNITS / unit).read_text().splitlines()
    exec_true = [
        f"{line.split('=', 1)[0]}=/bin/true" if line.startswith("Exec") else line for line in lines
    ]
    copy = tmp_path / "ftd.service"
    copy.write_text("\n".join(exec_true))
    done = subprocess.run(
        ["systemd-analyze", *manager, "verify", str(copy)],
        capture_output=True,
        text=True,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
