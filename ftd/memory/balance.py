"""Expert slots against KV pages: which way memory should move within one budget. Pure.

Both are worth seconds of computing saved in each second that passes: a slot the misses it turns
into hits, a page the prompt tokens that are not computed again and the time nobody waits for it.
A piece of memory moves when where it goes it is worth clearly more than where it comes from, and
back only when that has changed by much: every move costs fills and dropped pages.

Pages that sequences hold are never asked for here. A sequence that outgrows the pool does not wait
for a decision: ``room_for`` gives it what it needs at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Tuning:
    piece_share: float = 1 / 16  # of the budget: what moves at once
    margin: float = 0.5  # what comes must be worth so much more than what goes
    settle_s: float = 2.0  # between two moves: counters must show what the last one did
    reversal_s: float = 60.0  # for so long after a move the opposite one ...
    reversal_margin: float = 4.0  # ... must be worth so much more
    spare_share: float = 0.25  # of the pages in use, left free for their growth
    horizon_s: float = 30.0  # cached pages are expected to be asked for again within it
    payback_s: float = 30.0  # within which a move must earn its own cost


@dataclass(frozen=True, slots=True)
class Sizes:
    pages: int
    slots: int


@dataclass(frozen=True, slots=True)
class Limits:
    budget_bytes: int
    page_bytes: int
    record_bytes: int
    least_pages: int  # for the context that was promised
    most_pages: int
    most_slots: int
    staging_bytes: int = 0  # needed beside the slots as soon as an expert has none

    def bytes_of(self, sizes: Sizes) -> int:
        experts = sizes.slots * self.record_bytes + self.staging_of(sizes.slots)
        return sizes.pages * self.page_bytes + experts

    def staging_of(self, slots: int) -> int:
        return self.staging_bytes if slots < self.most_slots else 0

    def slots_in(self, num_bytes: int) -> int:
        """The most slots, with what they need beside them."""
        if num_bytes >= self.most_slots * self.record_bytes:
            return self.most_slots
        return max(0, (num_bytes - self.staging_bytes) // self.record_bytes)


@dataclass(frozen=True, slots=True)
class Demand:
    """What was seen since the last look."""

    steps_per_s: float
    miss_s: float  # what a miss costs more than a hit
    resident: np.ndarray  # [n] uses per step of experts with a slot, rising
    absent: np.ndarray  # [m] of those without, falling
    empty_slots: int
    pages_in_use: int  # by sequences
    pages_idle: int  # only the prefix cache holds them
    blocked: int  # requests that wait for pages
    blocked_pages: int  # that they lack
    token_s: float  # to compute one prompt token
    page_tokens: int
    computed_tokens_per_s: float
    reused_tokens_per_s: float
    evicted_pages_per_s: float  # of the prefix cache

    @property
    def reuse_share(self) -> float:
        asked = self.reused_tokens_per_s + self.computed_tokens_per_s
        return self.reused_tokens_per_s / asked if asked else 0.0


@dataclass(frozen=True, slots=True)
class LastMove:
    at_s: float = -math.inf
    to_pages: bool = False


def gain_of_pages(demand: Demand, n: int, tuning: Tuning) -> float:
    """Seconds a second that ``n`` more pages save: waiting, and computing again."""
    if n <= 0:
        return 0.0
    waiting = demand.blocked * min(1.0, n / max(1, demand.blocked_pages))
    dropped = demand.evicted_pages_per_s
    kept = min(1.0, n / (dropped * tuning.horizon_s)) if dropped else 0.0
    return waiting + kept * dropped * demand.page_tokens * demand.reuse_share * demand.token_s


def loss_of_pages(demand: Demand, sizes: Sizes, n: int, tuning: Tuning) -> float:
    """What ``n`` fewer cost: nothing while they are free, never those that sequences need."""
    spare = math.ceil(tuning.spare_share * demand.pages_in_use)
    free = sizes.pages - demand.pages_in_use - demand.pages_idle - spare
    cached = n - max(0, free)
    if cached <= 0:
        return 0.0
    if demand.blocked or cached > demand.pages_idle:
        return math.inf
    return demand.reused_tokens_per_s * demand.token_s * cached / demand.pages_idle


def gain_of_slots(demand: Demand, n: int) -> float:
    """Seconds a second that ``n`` more slots save, once they are filled."""
    uses = demand.absent[demand.empty_slots : demand.empty_slots + n]
    return float(uses.sum()) * demand.steps_per_s * demand.miss_s


def loss_of_slots(demand: Demand, n: int) -> float:
    """What ``n`` fewer cost: empty ones nothing, then those of the experts used least."""
    uses = demand.resident[: max(0, n - demand.empty_slots)]
    return float(uses.sum()) * demand.steps_per_s * demand.miss_s


def next_sizes(
    sizes: Sizes,
    limits: Limits,
    demand: Demand,
    last: LastMove,
    now_s: float,
    tuning: Tuning | None = None,
) -> Sizes | None:
    """Where to be next; None: everything is where it is worth most, or it is too early to tell."""
    tuning = tuning or Tuning()
    if now_s - last.at_s < tuning.settle_s:
        return None
    piece = limits.budget_bytes * tuning.piece_share
    more = _more_pages(sizes, limits, piece + demand.blocked_pages * limits.page_bytes)
    if more and _pays(
        gain_of_pages(demand, more.pages - sizes.pages, tuning),
        loss_of_slots(demand, sizes.slots - more.slots),
        0.0,
        _margin(tuning, last, now_s, to_pages=True),
    ):
        return more
    fewer = _fewer_pages(sizes, limits, piece)
    if fewer:
        moved = fewer.slots - sizes.slots
        fills_s = moved * demand.miss_s / tuning.payback_s
        loss = loss_of_pages(demand, sizes, sizes.pages - fewer.pages, tuning)
        margin = _margin(tuning, last, now_s, to_pages=False)
        if _pays(gain_of_slots(demand, moved), loss, fills_s, margin):
            return fewer
    return None


def room_for(pages: int, sizes: Sizes, limits: Limits) -> Sizes:
    """At least ``pages``, at the cost of slots; fewer only where the budget ends."""
    pages = min(max(pages, sizes.pages), limits.most_pages)
    left = limits.budget_bytes - pages * limits.page_bytes
    return Sizes(pages, min(sizes.slots, limits.slots_in(left)))


def _more_pages(sizes: Sizes, limits: Limits, piece_bytes: float) -> Sizes | None:
    wanted = max(1, int(piece_bytes // limits.page_bytes))
    most = (limits.budget_bytes - limits.staging_bytes) // limits.page_bytes
    pages = min(sizes.pages + wanted, most, limits.most_pages)
    return room_for(pages, sizes, limits) if pages > sizes.pages else None


def _fewer_pages(sizes: Sizes, limits: Limits, piece_bytes: float) -> Sizes | None:
    room = limits.budget_bytes - limits.bytes_of(sizes)
    slots = max(1, int(piece_bytes // limits.record_bytes))
    slots = min(slots, limits.most_slots - sizes.slots)
    needed = slots * limits.record_bytes - room
    gone = max(0, -(-needed // limits.page_bytes))
    if gone > sizes.pages - limits.least_pages:
        gone = max(0, sizes.pages - limits.least_pages)
        slots = min(slots, (room + gone * limits.page_bytes) // limits.record_bytes)
    return Sizes(sizes.pages - gone, sizes.slots + slots) if slots > 0 else None


def _margin(tuning: Tuning, last: LastMove, now_s: float, *, to_pages: bool) -> float:
    turns = last.to_pages != to_pages and now_s - last.at_s < tuning.reversal_s
    return tuning.reversal_margin if turns else tuning.margin


def _pays(gain: float, loss: float, cost: float, margin: float) -> bool:
    return gain > (1 + margin) * loss + cost
