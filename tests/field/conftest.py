from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside these tests

from running_ftd import RunningFtd, running_ftd


@pytest.fixture(scope="session")
def shared_ftd() -> Iterator[RunningFtd]:
    with running_ftd() as ftd:
        yield ftd


@pytest.fixture
def ftd(shared_ftd: RunningFtd) -> Iterator[RunningFtd]:
    """One daemon for many tests; whatever a test did, it is at rest and answers afterwards."""
    yield shared_ftd
    assert shared_ftd.process.poll() is None, shared_ftd.log.read_text()
    shared_ftd.wait_rest()
