"""Fixtures shared by the whole tree."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is decorated
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two cores: torch's threads would fight the pool's

import pytest
import structlog
from hypothesis import HealthCheck, settings

# a loaded machine is slow, and that is nobody's fault; the same examples in each run, and new ones
# with --hypothesis-profile explore
slow = [HealthCheck.too_slow]
settings.register_profile("same", deadline=None, suppress_health_check=slow, derandomize=True)
settings.register_profile("explore", deadline=None, suppress_health_check=slow)
settings.load_profile("same")

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return DATA


@pytest.fixture(scope="session")
def script_model_dir() -> Path:
    """The tiny MoE that answers each scripted prompt of ``scripts.yaml`` with exactly its text."""
    return DATA / "script-model"


@pytest.fixture
def log_as_before() -> Iterator[None]:
    """For tests that run a whole command: it says where the log of its process goes."""
    handlers = logging.getLogger().handlers[:]
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers
    logging.captureWarnings(False)
