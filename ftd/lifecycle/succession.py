"""Decisions of the lifecycle, as functions of plain numbers: beside or after, again or give up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftd.units import MiB

HEADROOM_BYTES = 256 * MiB  # kept for none: tokenizer, allocator and what the machine needs itself
MAX_FAILURES = 3  # within FAILURE_PERIOD_S; one more is no accident any longer
FAILURE_PERIOD_S = 600.0
FIRST_DELAY_S = 0.5  # doubled with each further failure
RETRY_AFTER_S = (1.0, 60.0)  # what a client may be told, shortest and longest


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes a model would take of one memory, and what that memory has free now."""

    need_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Preflight:
    """What serving a model would take, known from its headers alone."""

    host: Need
    device: Need | None  # None on the CPU device: all of it is host memory
    report: tuple[str, ...]  # the printed plan and every finding, line by line


def fits_beside(preflight: Preflight) -> bool:
    """Whether the model can be loaded while the old one still serves."""
    memories = [preflight.host, *([preflight.device] if preflight.device else [])]
    return all(m.need_bytes + HEADROOM_BYTES <= m.free_bytes for m in memories)


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
