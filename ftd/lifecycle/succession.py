"""Decisions of the lifecycle, as functions of plain numbers: beside or after, again or give up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_FAILURES = 3  # within FAILURE_PERIOD_S; one more is no accident any longer
FAILURE_PERIOD_S = 600.0
FIRST_DELAY_S = 0.5  # doubled with each further failure
RETRY_AFTER_S = (1.0, 60.0)  # what a client may be told, shortest and longest


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a loaded model, in bytes."""

    resident_bytes: int  # come back when it is freed
    growth_bytes: int  # planned, and perhaps not touched yet: still its own


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a plan grants a model."""

    context_tokens: int
    kv_tokens: int
    slots: int


def available_beside(available_bytes: int, old: Footprint) -> int:
    """For a model that is loaded while the old one still serves and may grow to its plan."""
    return max(0, available_bytes - old.growth_bytes)


def available_after(available_bytes: int, old: Footprint) -> int:
    """For a model that is loaded once the old one is freed."""
    return available_bytes + old.resident_bytes


def fits_beside(beside: Capacity | None, alone: Capacity) -> bool:
    """Whether the model loses nothing by being loaded while the old one still serves.

    Args:
        beside: what it would be granted then; None: not even the least.
        alone: what it would be granted after the old one is freed.
    """
    return beside == alone


def recovery_delay_s(failures_s: Sequence[float], now_s: float) -> float | None:
    """How long to wait before a failed engine is loaded again; None: give up.

    Args:
        failures_s: when the engine failed, the last failure included.
    """
    recent = sum(now_s - at_s <= FAILURE_PERIOD_S for at_s in failures_s)
    return None if recent > MAX_FAILURES else FIRST_DELAY_S * 2.0 ** (recent - 1)


def retry_after_s(elapsed_s: float, done: int, total: int) -> float:
    """When a client should ask again, if loading goes on at the rate it has had so far."""
    shortest, longest = RETRY_AFTER_S
    if not 0 < done <= total:
        return 5.0  # nothing is known yet: what a small model takes
    return min(longest, max(shortest, elapsed_s * (total - done) / done))
