"""The daemon as a process: start, signals in every state, failures, what systemd hears."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ftd.control import protocol as p
from ftd.control.client import Client, ControlError

ENTRY = Path(__file__).parents[1] / "lifecycle" / "run_scripted.py"
PROMISED_S = 5.0  # from a signal to the end


def fetch(url, body=None):
    data = body and json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        assert error.code != 503 or int(error.headers["Retry-After"]) >= 1
        return error.code, error.read().decode()


class Process:
    def __init__(self, folder, scene, port=0):
        self.path = folder / "ftd.sock"
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(folder / "notify"))
        self.notify.settimeout(20)
        self.heard = []
        self.popen = subprocess.Popen(
            [sys.executable, str(ENTRY), str(self.path), scene, str(port)],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "NOTIFY_SOCKET": str(folder / "notify"),
                "WATCHDOG_USEC": "1000000",
            },
        )

    def told(self, word):
        """Wait for the next thing systemd is told that begins with ``word``; each counts once."""
        while not (found := [line for line in self.heard if line.startswith(word)]):
            self.heard.append(self.notify.recv(4096).decode())
        self.heard.remove(found[0])

    def call(self, command):
        until_s = time.monotonic() + 20
        while True:
            try:
                with Client(self.path) as client:
                    return client.call(command)
            except ControlError:
                if time.monotonic() > until_s or self.popen.poll() is not None:
                    raise
                time.sleep(0.02)

    def http(self, path, body=None):
        until_s = time.monotonic() + 20
        while not (address := self.call(p.Status()).http):  # the control socket is there first
            assert time.monotonic() < until_s
            time.sleep(0.02)
        return fetch(address + path, body)

    def wait(self):
        """Exit code and what was written to stderr; the promise about time is checked by kill."""
        _, err = self.popen.communicate(timeout=PROMISED_S + 15)
        return self.popen.returncode, err

    def end(self, *signals):
        began_s = time.monotonic()
        for number in signals:
            self.popen.send_signal(number)
            time.sleep(0.05)
        code, err = self.wait()
        self.took_s = time.monotonic() - began_s
        return code, err


@contextmanager
def running(folder, scene, port=0):
    process = Process(folder, scene, port)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()
        process.notify.close()


def ask(process, results, *, stream=False, max_tokens=60):
    body = {"model": "a", "prompt": "Hi", "max_tokens": max_tokens, "stream": stream}
    thread = threading.Thread(
        target=lambda: results.append(process.http("/v1/completions", body)), daemon=True
    )
    thread.start()
    return thread


def wait_for_reading(process):
    """A signal before it would end the steps that come first: they hold no thread for long."""
    until_s = time.monotonic() + 20
    while not (at := process.call(p.Status()).progress) or at.phase != "reading weights":
        assert time.monotonic() < until_s
        time.sleep(0.01)


def wait_for_request(process):
    until_s = time.monotonic() + 20
    while not process.call(p.Requests()).requests:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def assert_clean(process, code, err):
    assert code == 0, err
    assert not process.path.exists()
    assert "threads left: []" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_from_start_to_end(tmp_path, number):
    with running(tmp_path, "ready") as process:
        process.told("STATUS=Loading: the model is loading")
        process.told("READY=1")
        assert process.http("/health")[0] == 200
        process.told("STATUS=Serving a at http://127.0.0.1:")
        process.told("WATCHDOG=1")
        children = psutil.Process(process.popen.pid).children()
        code, err = process.end(number)
        assert_clean(process, code, err)
        (loaded,) = (line for line in err.splitlines() if "model.loaded" in line)
        assert "http://127.0.0.1:" in loaded
        process.told("STOPPING=1")
        assert children == []


def test_not_ready_while_loading_and_a_signal_ends_it(tmp_path):
    with running(tmp_path, "loading") as process:
        status = process.call(p.Status())
        assert (status.state, status.ready) == ("loading", False)
        code, body = process.http("/health")
        assert code == 503 and json.loads(body)["ready"] is False
        assert process.http("/health/live")[0] == 200
        assert process.http("/v1/completions", {"prompt": "x"})[0] == 503
        wait_for_reading(process)
        assert_clean(process, *process.end(signal.SIGTERM))
        assert process.took_s < PROMISED_S


def test_a_stuck_load_does_not_hold_the_end(tmp_path):
    with running(tmp_path, "stuck") as process:
        wait_for_reading(process)
        code, err = process.end(signal.SIGTERM)
        assert code == 0 and process.took_s < PROMISED_S
        assert not process.path.exists() and "threads left: ['ftd-work']" in err


def test_what_hangs_while_ending_is_left_by_force(tmp_path):
    with running(tmp_path, "hangs") as process:
        process.told("READY=1")
        code, err = process.end(signal.SIGTERM)
        assert code == 1 and not process.path.exists()
        assert "ftd: something hung while ending; left by force" in err


def test_short_requests_finish_before_the_end(tmp_path):
    with running(tmp_path, "ready") as process:
        process.told("READY=1")
        results = []
        thread = ask(process, results)
        wait_for_request(process)
        assert_clean(process, *process.end(signal.SIGTERM))
        thread.join(5)
        ((code, body),) = results
        assert code == 200 and json.loads(body)["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]], ids=len)
def test_long_requests_are_told_why_they_end(tmp_path, signals):
    with running(tmp_path, "slow") as process:
        process.told("READY=1")
        plain, streamed = [], []
        threads = [
            ask(process, plain, max_tokens=61),
            ask(process, streamed, stream=True, max_tokens=61),
        ]
        while len(process.call(p.Requests()).requests) < 2:
            time.sleep(0.01)
        assert_clean(process, *process.end(*signals))
        assert process.took_s < PROMISED_S
        for thread in threads:
            thread.join(5)
        assert plain[0][0] == 503 and "ftd is stopping" in plain[0][1]
        assert streamed[0][0] == 200 and "ftd is stopping" in streamed[0][1]


def test_stop_command_ends_it(tmp_path):
    with running(tmp_path, "ready") as process:
        process.told("READY=1")
        with Client(process.path) as client:
            assert client.call(p.Stop()).pid == process.popen.pid
            client.wait_closed()
            assert not process.path.exists()
        assert_clean(process, *process.wait())


def test_hangup_reloads_the_same_model(tmp_path):
    with running(tmp_path, "ready") as process:
        process.told("READY=1")
        process.popen.send_signal(signal.SIGHUP)
        process.told("RELOADING=1")
        process.told("READY=1")
        assert process.call(p.Status()).model == "a"
        code, err = process.end(signal.SIGTERM)
        assert_clean(process, code, err)
        assert '"event":"model.reloaded"' in err


def test_cut_reload_answers_everybody(tmp_path):
    """Those who run get 503 and Retry-After; those who come during the switch wait for it."""
    with running(tmp_path, "slow") as process:
        process.told("READY=1")
        cut, late, done = [], [], []
        running_one = ask(process, cut, max_tokens=2000)
        wait_for_request(process)
        reloading = threading.Thread(
            target=lambda: done.append(process.call(p.Reload("b", "cut"))), daemon=True
        )
        reloading.start()
        while process.call(p.Health()).ready:
            time.sleep(0.005)
        url = process.call(p.Status()).http + "/v1/completions"
        waiting = threading.Thread(
            target=lambda: late.append(fetch(url, {"model": "b", "prompt": "Hi", "max_tokens": 3})),
            daemon=True,
        )
        waiting.start()
        for thread in (running_one, reloading, waiting):
            thread.join(20)
        assert cut[0][0] == 503 and "is being replaced" in cut[0][1]
        assert (done[0].was, done[0].drained) == ("a", False)
        assert late[0][0] == 200 and json.loads(late[0][1])["model"] == "b"
        assert_clean(process, *process.end(signal.SIGTERM))


@pytest.mark.parametrize(
    ("scene", "cause"), [("refused", "shard 2 is missing"), ("broken", "disk on fire")]
)
def test_model_that_cannot_be_loaded_is_a_failure_with_its_cause(tmp_path, scene, cause):
    with running(tmp_path, scene) as process:
        code, err = process.wait()
        assert code == 1
        assert any(line.startswith("ftd: error: ") and cause in line for line in err.splitlines())
        assert "operation.failed" not in err
        assert not process.path.exists()


def test_taken_port_is_an_error_before_anything_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with running(tmp_path, "ready", port) as process:
            code, err = process.wait()
            assert code == 1 and not process.path.exists()
            assert f"--http 127.0.0.1:{port}: the port is taken by another process" in err
            assert "model." not in err


def test_second_daemon_on_a_socket_is_refused_and_harms_nobody(tmp_path):
    with running(tmp_path, "ready") as process:
        process.told("READY=1")
        (tmp_path / "second").mkdir()
        done = subprocess.run(
            [sys.executable, str(ENTRY), str(process.path), "ready", "0"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1 and "another ftd listens there" in done.stderr
        assert process.call(p.Health()).ready


def test_failed_engine_answers_all_then_recovers_then_gives_up(tmp_path):
    with running(tmp_path, "fails") as process:
        process.told("STATUS=Serving")
        for failure in range(4):
            results = []
            ask(process, results).join(20)
            assert results[0][0] == 500 and "out of memory" in results[0][1]
            if failure < 3:
                process.told("STATUS=Failed")
                process.told("STATUS=Serving")
                assert "out of memory" in process.call(p.Status()).last_failure
        code, err = process.wait()
        assert code == 1
        assert "ftd: error: the engine failed too often, at last: a step failed" in err
        assert not process.path.exists()


def test_no_text_of_a_request_is_logged(tmp_path):
    with running(tmp_path, "ready") as process:
        process.told("READY=1")
        body = {"model": "a", "prompt": "xylophone secret", "max_tokens": 3}
        assert process.http("/v1/completions", body)[0] == 200
        _, err = process.end(signal.SIGTERM)
        assert "xylophone" not in err
        assert all(
            "mono_s" in json.loads(line) for line in err.splitlines() if line.startswith("{")
        )


def test_port_and_socket_do_not_wait_for_torch():
    probe = "import sys, ftd.daemon, ftd.http.app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
