"""Measures the machine with a loaded model, slice by slice, each between two steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ftd.engine.core import EngineCore
from ftd.engine.profiling import Profiling
from ftd.errors import ConfigError
from ftd.experts.measure import Slice
from ftd.experts.profile import Profile
from ftd.experts.profile_store import ProfileStore


@dataclass(frozen=True, slots=True)
class Measured:
    """A finished measurement, for those who know nothing of experts."""

    profile: Profile
    experts_per_token: int
    parts: int  # of an expert that link and CPU may share
    store: ProfileStore

    def save(self) -> Path:
        """Raises ConfigError: it cannot be written."""
        return self.store.save(self.profile)


@dataclass(frozen=True, slots=True)
class Done:
    """One slice."""

    found: Slice | Measured
    took_s: float


def measure_slice(core: EngineCore, owner: object) -> Done:
    """Measure a little more: ``Profiling.next_slice``. Raises Busy, ConfigError."""
    profiling, began_s = profiling_of(core), time.monotonic()
    found = profiling.next_slice(owner)
    took_s = time.monotonic() - began_s
    if isinstance(found, Profile):
        return Done(
            Measured(found, profiling.experts_per_token, profiling.parts, profiling.store), took_s
        )
    return Done(found, took_s)


def end_measuring(core: EngineCore, owner: object) -> None:
    if core.steps.profiling is not None:
        core.steps.profiling.end(owner)


def profiling_of(core: EngineCore) -> Profiling:
    """Raises ConfigError: this engine has nothing to measure."""
    if core.steps.profiling is None:
        raise ConfigError("there is nothing to measure: neither a link nor a CPU computes experts")
    return core.steps.profiling
