"""sd_notify against a real socket."""

import os
import socket
import uuid

import pytest

from ftd.systemd import Notifier


@pytest.fixture(params=["path", "abstract"])
def listener(request, tmp_path):
    name = f"@ftd-{uuid.uuid4()}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(name.replace("@", "\0", 1) if name[0] == "@" else name)
        channel.settimeout(5)
        yield name, lambda: channel.recv(4096).decode()


def test_messages(listener):
    address, received = listener
    notifier = Notifier(address)
    notifier.ready()
    assert received() == "READY=1"
    notifier.watchdog()
    assert received() == "WATCHDOG=1"
    notifier.stopping()
    assert received() == "STOPPING=1"
    notifier.reloading()
    key, micros = received().split("\n")
    assert key == "RELOADING=1"
    assert int(micros.removeprefix("MONOTONIC_USEC=")) > 0


def test_status_is_one_line_and_sent_only_when_it_changes(listener):
    address, received = listener
    notifier = Notifier(address)
    notifier.status("Loading:\nreading weights,  43% of 57 GiB")
    notifier.status("Loading: reading weights, 43% of 57 GiB")
    notifier.ready()
    assert received() == "STATUS=Loading: reading weights, 43% of 57 GiB"
    assert received() == "READY=1"


def test_without_systemd_nothing_happens():
    notifier = Notifier.from_environ({})
    notifier.ready()
    assert notifier.watchdog_s is None


def test_a_socket_that_is_gone_does_no_harm(tmp_path):
    Notifier(str(tmp_path / "gone")).ready()


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_is_ours_only_if_named(environ, watchdog_s):
    assert Notifier.from_environ(environ).watchdog_s == watchdog_s
