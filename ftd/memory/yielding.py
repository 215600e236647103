"""``--vram auto``: leave to other processes what they take of the GPU, take what they leave. Pure.

There is a band of free memory within which nothing happens. Below it the budget shrinks at once,
look by look: another process may fail for want of it. Above it the budget grows, but only after a
calm time, since whoever has just given memory back often takes it again. Both start from what is in
use: of a budget that is not used up nothing can be given, and nothing more has to be taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftd.errors import ConfigError
from ftd.units import MiB

SPARE_BYTES = 1024 * MiB  # kept free for whoever comes; the budget is brought back to this
LOW_BYTES = 512 * MiB  # less free than that: yield
HIGH_BYTES = 2048 * MiB  # more free than that, for ``CALM_S``: take
CALM_S = 30.0
STEP_BYTES = 256 * MiB  # budgets are multiples of it


@dataclass(frozen=True, slots=True)
class Calm:
    """Since when much has been free; None: it is not."""

    since_s: float | None = None


def next_budget(
    budget_bytes: int,
    used_bytes: int,
    free_bytes: int,
    total_bytes: int,
    calm: Calm,
    now_s: float,
) -> tuple[int | None, Calm]:
    """The budget to have next, None: as it is; and what to remember until the next look.

    Args:
        used_bytes: of the budget.
        free_bytes: of the GPU, whoever may take them.
    """
    target = _stepped(used_bytes + free_bytes - SPARE_BYTES)
    if free_bytes < LOW_BYTES:
        return min(budget_bytes, target), Calm()
    if free_bytes <= HIGH_BYTES:
        return None, Calm()
    if calm.since_s is None:
        return None, replace(calm, since_s=now_s)
    if now_s - calm.since_s < CALM_S:
        return None, calm
    found = min(target, _stepped(total_bytes))
    return (found if found > budget_bytes else None), Calm()


def no_gpu_to_share() -> ConfigError:
    return ConfigError(
        "--vram auto leaves to other processes what they take of the GPU, and ftd uses none",
        hint="leave --vram out, or use --vram SIZE",
    )


def _stepped(num_bytes: int) -> int:
    return max(0, num_bytes // STEP_BYTES * STEP_BYTES)
