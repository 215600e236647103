"""The tool that times streams finds every token of every API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_streams.py"


def run(*flags: str) -> str:
    done = subprocess.run(
        [sys.executable, TOOL, *flags], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_token_of_every_api_is_timed():
    said = run("--streams=3", "--rate=1000", "--tokens=40", "--rounds=1")
    for api in ("chat", "messages", "responses", "bare"):
        assert f"\n{api} " in said
