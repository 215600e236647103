"""What the engine knows of the worth of its memory, as of a safe point: plain numbers, a copy."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from ftd.engine.core import EngineCore

_NO_USES = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Observed:
    at_s: float
    pages: int
    slots: int
    pages_in_use: int  # by sequences
    pages_idle: int  # only the prefix cache holds them
    blocked: int  # requests that wait though a place is free, since they lack pages
    blocked_pages: int  # that they lack
    token_s: float  # to compute one prompt token; 0: not known yet
    miss_s: float  # what a miss costs more than a hit; 0: not known
    # since start
    steps: int
    prompt_tokens: int
    reused_tokens: int
    evicted_pages: int  # for good: those that went to host memory come back fast
    # uses per step that are expected of each expert
    resident: np.ndarray = field(default_factory=lambda: _NO_USES, repr=False)  # rising
    absent: np.ndarray = field(default_factory=lambda: _NO_USES, repr=False)  # falling

    @property
    def empty_slots(self) -> int:
        return self.slots - len(self.resident)


def observe(core: EngineCore) -> Observed:
    """On the engine thread, between two steps. Cost: a sort of all experts, 1 ms for 15,000."""
    pages, totals, page_tokens = core.pages, core.roster.totals, core.kv.page_tokens
    host = core.held.host
    waiting = core.roster.oldest_waiting()
    places = core.limits.max_running - len(core.roster.running)
    wanted = sum(-(-len(s.ids) // page_tokens) for s in waiting[: max(0, places)])
    lacking = max(0, wanted - pages.free - pages.idle)
    experts = core.experts.residency_map()
    values, here = experts.value.ravel(), experts.slot.ravel() >= 0
    return Observed(
        at_s=time.monotonic(),
        pages=pages.num_pages,
        slots=core.experts.counters().slots_total,
        pages_in_use=pages.held - pages.idle,
        pages_idle=pages.idle,
        blocked=min(places, len(waiting)) if lacking else 0,
        blocked_pages=lacking,
        miss_s=core.steps.profiling.miss_s if core.steps.profiling else 0.0,
        token_s=core.steps.rates.token_s,
        steps=totals.steps,
        prompt_tokens=totals.prompt_tokens,
        reused_tokens=totals.reused_tokens,
        evicted_pages=core.held.pages_evicted - (host.pages_saved if host else 0),
        resident=np.sort(values[here]),
        absent=np.sort(values[~here])[::-1],
    )
