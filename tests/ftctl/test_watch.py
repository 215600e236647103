"""The live view: frames of any size, and the real command on a terminal of its own."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from fcntl import ioctl

import pytest
from test_ftctl import running

from ftctl import view
from ftctl.view import Paint
from ftctl.watch import BARS, History, Style, chart, frame
from ftd.control import protocol as p
from ftd.control.traffic import between
from ftd.engine.api import EngineStatus, RequestInfo
from ftd.kv.anchors import AnchorTotals
from ftd.lifecycle.served import Reads

PLAIN, FANCY = Style(Paint(False), unicode=False), Style(Paint(True), unicode=True)
GB = 10**9

EVENT = p.StatusResult(
    version="0.1.0",
    pid=4711,
    uptime_s=185.0,
    state="ready",
    ready=True,
    cause=None,
    last_failure=None,
    model="qwen3-30b",
    path="/models/x",
    http="http://127.0.0.1:1919",
    rss_bytes=57 * 2**30,
    memory=(
        p.MemoryRow("dense weights", 2 * 2**30, 2 * 2**30),
        p.MemoryRow("host pool", 54 * 2**30, 54 * 2**30),
        p.MemoryRow("KV pool", 16 * 2**30, 4 * 2**30),
        p.MemoryRow("expert slots", 8 * 2**30, 8 * 2**30),
        p.MemoryRow("headroom", 2**40, 2**40),
    ),
    traffic=p.Traffic(0.5, 10.0, 120.0, 0.0, 300.0, 900.0, 100.0, 60.0, 3.0, None, 9.1 * GB),
    engine=EngineStatus(
        running=8,
        waiting=3,
        pages_total=4096,
        pages_held=4000,
        pages_cached=1000,
        slots_total=2048,
        slots_used=2000,
        preempted=2,
        host_pages_total=512,
        host_pages_held=128,
        anchors=AnchorTotals(1234, 3 * 2**30, 2**30, 0, 2**33, 56, 754.0),
        decode_tokens_per_s=120.0,
        requests=tuple(
            RequestInfo(f"chatcmpl-{i}" * 5, "prefill", 12000, 512, 0, 0, 3.5) for i in range(30)
        ),
    ),
)
FULL = replace(
    EVENT,
    state="reloading",
    model="a-very-long-name" * 9,
    last_failure="loading b failed: " + "very " * 40 + "long",
    progress=p.Progress("reading weights", 30 * 2**30, 57 * 2**30),
)
BARE = replace(
    EVENT, state="failed", ready=False, cause="shard 2 is missing", model=None, engine=None,
    memory=(), traffic=None,
)  # fmt: skip


def visible(line: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", line)


@pytest.mark.parametrize("event", [EVENT, FULL, BARE, replace(EVENT, traffic=None)])
@pytest.mark.parametrize("columns", [2, 9, 20, 79, 80, 300])
@pytest.mark.parametrize("rows", [1, 2, 5, 24, 60])
def test_a_frame_fits_any_terminal(event, columns, rows):
    history = History()
    for _ in range(40):
        history.add(event)
    for style in (PLAIN, FANCY):
        lines = frame(event, history, columns, rows, style)
        assert len(lines) <= rows
        assert max((len(visible(line)) for line in lines), default=0) <= columns
        assert not any("\n" in line for line in lines)


def test_what_stands_in_it_at_eighty_columns():
    history = History()
    history.add(EVENT)
    text = "\n".join(frame(FULL, history, 80, 60, PLAIN))
    assert re.search(r"KV +\[#+-*\]  98% 4,000 of 4,096 pages, 1,000 cached", text)
    assert re.search(r"experts +\[#+-*\]  98% 2000 of 2048 slots", text)
    assert re.search(r"host KV +\[#+-*\]  25% 128 of 512 pages in host memory", text)
    assert "anchors   1,234: 56 hits saved 12 min 34 s; KV 3.00 GiB, host 1.00 GiB" in text
    assert "90% hits of 1,000/s; misses 60/s fetched, 40/s in place; 3/s evicted" in text
    assert "DRAM 9.10 GB/s of weights" in text
    assert "prefix    100% of tokens reused" in text
    assert "3 waiting" in text and "put off 2 times" in text
    assert re.search(r"decode +@ +120.0 tok/s", text)
    assert re.search(r"reading weights \[#+-+\]  53% 30.0 GiB of 57.0 GiB", text)
    assert re.search(r"\n[dpKE.]{80}\n", text), "the map of memory"
    assert "K KV pool 4.00 GiB of 16.0 GiB" in text and "p host pool 54.0 GiB" in text


def test_status_and_lines_for_files_have_anchors_and_host_memory():
    text = "\n".join(view.status(EVENT, Paint(False)))
    assert "host KV   128 of 512 pages, 0 have come back from there" in text
    assert "anchors   1,234: 56 hits saved 12 min 34 s; KV 3.00 GiB, host 1.00 GiB, disk" in text
    line = " ".join(view.one_line(EVENT, Paint(False)))
    assert "anchors=1234 anchor_hits=56 host_pages=128/512" in line


def test_the_map_shares_the_width_by_bytes():
    lines = frame(EVENT, History(), 80, 60, PLAIN)
    row = next(line for line in lines if set(line) <= set("dpKE.") and len(line) > 40)
    assert row == "d" * 2 + "p" * 54 + "K" * 4 + "." * 12 + "E" * 8


def test_without_a_model_it_says_why():
    assert "failed: shard 2 is missing" in frame(BARE, History(), 80, 24, PLAIN)


def test_more_requests_than_rows_are_counted():
    lines = frame(EVENT, History(), 80, 24, PLAIN)
    assert any(re.fullmatch(r"and \d+ more: ftctl requests", line) for line in lines)


def test_a_chart_is_drawn_against_its_largest_value():
    assert chart([0, 1, 5, 10], 6, BARS) == "   .+@"
    assert chart([0, 0], 3, BARS) == "   " and chart([], 2, BARS) == "  "


class TestTraffic:
    BEFORE = EngineStatus(steps=10, output_tokens=5, expert_hits=100, expert_misses=10)
    NOW = EngineStatus(
        steps=30, output_tokens=25, expert_hits=180, expert_misses=30, expert_fetched=10,
        slots_total=4,
    )  # fmt: skip

    def test_rates_are_differences_by_seconds(self):
        found = between(self.BEFORE, self.NOW, 2.0, Reads(100, 7, on_gpu=False))
        assert (found.steps_per_s, found.decode_tokens_per_s) == (10.0, 10.0)
        assert (found.hits_per_s, found.misses_per_s, found.fetched_per_s) == (40.0, 10.0, 5.0)
        assert found.dram_bytes_per_s == (40 + 10) * 100 + 10 * 7 and found.link_bytes_per_s is None

    def test_on_a_gpu_only_misses_are_read_from_the_host(self):
        found = between(self.BEFORE, self.NOW, 2.0, Reads(100, 7, on_gpu=True))
        assert (found.link_bytes_per_s, found.dram_bytes_per_s) == (500.0, 1000.0)

    def test_another_engine_and_no_slots_are_not_counted(self):
        assert between(self.NOW, self.BEFORE, 1.0, None) is None
        without = replace(self.NOW, slots_total=0)
        found = between(self.BEFORE, without, 1.0, Reads(100, 7, on_gpu=False))
        assert found.dram_bytes_per_s is None


class Terminal:
    """ftctl on a pseudo terminal."""

    def __init__(self, path, *words):
        self.master, slave = pty.openpty()
        self.resize(24, 80, None)
        environ = {**os.environ, "FTD_SOCKET": str(path), "TERM": "xterm", "LC_ALL": "C.UTF-8"}
        environ.pop("NO_COLOR", None)
        environ.pop("COLUMNS", None)
        environ.pop("LINES", None)
        command = [sys.executable, "-m", "ftctl.cli", *words]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True
        )
        os.close(slave)
        self.seen = b""

    def resize(self, rows, columns, process):
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if process:
            process.send_signal(signal.SIGWINCH)

    def until(self, pattern, timeout_s=20.0):
        give_up_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < give_up_s, self.seen[-2000:]
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.master, 65536)
                except OSError:  # the other end has closed
                    assert re.search(pattern, self.seen), self.seen[-2000:]
        self.seen = self.seen[found.end() :]

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_a_terminal_gets_frames_of_its_size_until_q(tmp_path):
    path = tmp_path / "ftd.sock"
    with running(path):
        terminal = Terminal(path, "watch", "--interval", "50ms")
        try:
            terminal.until(rb"\x1b\[\?1049h")
            terminal.until(rb"a at http://127.0.0.1:1919")
            terminal.until(rb"q or Ctrl-C leaves; ftd goes on")
            terminal.resize(24, 30, terminal.process)
            terminal.until(rb"\x1b\[Hq|a at http://127.0.0.1:1919\x1b\[0m\x1b\[K")
            os.write(terminal.master, b"xq")
            terminal.until(rb"\x1b\[\?25h\x1b\[\?1049l")
            assert terminal.process.wait(10) == 0
        finally:
            terminal.close()
