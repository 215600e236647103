"""Measures the machine with a served model, while it serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ftd.engine.api import EngineHandle
from ftd.engine.measuring import Measured, Slice, end_measuring, measure_slice
from ftd.lifecycle.beside import on_thread


@dataclass(frozen=True, slots=True)
class Profiled:
    measured: Measured
    path: Path
    took_s: float
    longest_pause_s: float


async def profile_machine(engine: EngineHandle, progress: Callable[[Slice], None]) -> Profiled:
    """Measure slice by slice; the engine goes by the result from its last slice on.

    While requests run, they have as long between two slices as a slice took.

    Raises:
        Busy: a measurement is under way.
        ConfigError: there is nothing to measure, or the profile cannot be kept.
        NotReady: the model went away.
    """
    began_s, longest_s, owner = time.monotonic(), 0.0, object()
    try:
        while True:
            done = await engine.at_safe_point(lambda core: measure_slice(core, owner))
            if isinstance(done.found, Measured):
                break
            longest_s = max(longest_s, done.took_s)
            progress(done.found)
            if engine.status().running:
                await asyncio.sleep(done.took_s)
    finally:
        await asyncio.shield(engine.at_safe_point(lambda core: end_measuring(core, owner)))
    path = await on_thread(done.found.save)
    return Profiled(done.found, path, time.monotonic() - began_s, longest_s)
