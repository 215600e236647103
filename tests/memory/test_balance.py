"""Slots against pages: bounds hold for any demand, and a small model of a server settles."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.memory.balance import (
    Demand,
    LastMove,
    Limits,
    Sizes,
    Tuning,
    gain_of_slots,
    loss_of_pages,
    loss_of_slots,
    next_sizes,
    room_for,
)

MIB = 2**20
TUNING = Tuning()


def limits(budget_mib: int = 4096, most_slots: int = 600, least_pages: int = 8) -> Limits:
    return Limits(budget_mib * MIB, MIB, 8 * MIB, least_pages, 10_000, most_slots)


def demand(**facts: object) -> Demand:
    quiet = Demand(
        steps_per_s=50.0,
        miss_s=2e-4,
        resident=np.zeros(0),
        absent=np.zeros(0),
        empty_slots=0,
        pages_in_use=0,
        pages_idle=0,
        blocked=0,
        blocked_pages=0,
        token_s=1e-4,
        page_tokens=16,
        computed_tokens_per_s=0.0,
        reused_tokens_per_s=0.0,
        evicted_pages_per_s=0.0,
    )
    return replace(quiet, **facts)


rates = st.floats(0, 1e4)


@settings(deadline=None)
@given(st.data())
def test_bounds_hold_for_any_demand(data):
    bounds = limits(data.draw(st.integers(16, 8192)), data.draw(st.integers(0, 900)))
    pages = data.draw(st.integers(8, bounds.budget_bytes // bounds.page_bytes))
    left = bounds.budget_bytes - pages * bounds.page_bytes
    staging = data.draw(st.sampled_from([0, 3 * MIB, 100 * MIB]))
    bounds = replace(bounds, staging_bytes=min(staging, left))
    slots = data.draw(st.integers(0, min(bounds.slots_in(left), bounds.most_slots)))
    in_use = data.draw(st.integers(0, pages))
    idle = data.draw(st.integers(0, pages - in_use))
    empty = data.draw(st.integers(0, slots))
    uses = np.sort(np.random.default_rng(data.draw(st.integers(0, 99))).random(bounds.most_slots))
    seen = demand(
        steps_per_s=data.draw(rates),
        resident=uses[bounds.most_slots - slots + empty :],
        absent=uses[: bounds.most_slots - slots + empty][::-1],
        empty_slots=empty,
        pages_in_use=in_use,
        pages_idle=idle,
        blocked=data.draw(st.integers(0, 9)),
        blocked_pages=data.draw(st.integers(0, 5000)),
        token_s=data.draw(st.floats(0, 1)),
        computed_tokens_per_s=data.draw(rates),
        reused_tokens_per_s=data.draw(rates),
        evicted_pages_per_s=data.draw(rates),
    )
    found = next_sizes(Sizes(pages, slots), bounds, seen, LastMove(), 0.0)
    if found is None:
        return
    assert found != Sizes(pages, slots)
    assert bounds.bytes_of(found) <= bounds.budget_bytes
    assert bounds.least_pages <= found.pages <= bounds.most_pages
    assert 0 <= found.slots <= bounds.most_slots
    assert found.pages >= in_use, "pages that sequences hold were asked for"
    assert not (found.pages < pages and seen.blocked and found.pages < in_use + idle)


@given(pages=st.integers(8, 4000), need=st.integers(1, 6000))
def test_room_is_found_at_once_and_within_the_budget(pages, need):
    bounds = limits()
    slots = (bounds.budget_bytes - pages * bounds.page_bytes) // bounds.record_bytes
    found = room_for(need, Sizes(pages, slots), bounds)
    assert found.pages >= min(need, bounds.most_pages) and found.pages >= pages
    if need <= bounds.budget_bytes // bounds.page_bytes:
        assert bounds.bytes_of(found) <= bounds.budget_bytes
    assert found.slots <= slots


def test_free_pages_cost_nothing_and_those_in_use_everything():
    seen = demand(pages_in_use=40, pages_idle=20, reused_tokens_per_s=1000.0)
    sizes = Sizes(100, 0)
    assert loss_of_pages(seen, sizes, 30, TUNING) == 0.0  # 40 free, 10 of them for growth
    assert 0 < loss_of_pages(seen, sizes, 40, TUNING) < float("inf")
    assert loss_of_pages(seen, sizes, 51, TUNING) == float("inf")


def test_slots_are_worth_the_uses_of_those_next_in_line():
    seen = demand(resident=np.array([0.1, 0.5]), absent=np.array([0.4, 0.3, 0.0]), empty_slots=1)
    per_use = seen.steps_per_s * seen.miss_s
    assert gain_of_slots(seen, 2) == pytest.approx(0.3 * per_use)  # one is empty already
    assert loss_of_slots(seen, 1) == 0.0
    assert loss_of_slots(seen, 2) == pytest.approx(0.1 * per_use)


@dataclass
class Server:
    """Experts whose popularity falls like 1/rank, and as many pages in use as sequences need."""

    bounds: Limits
    sizes: Sizes
    steps_per_s: float = 50.0
    uses: np.ndarray = field(default_factory=lambda: 8 / np.arange(1, 601))
    wanted_pages: int = 100  # by sequences
    cached_pages: int = 0  # that come again
    last: LastMove = field(default_factory=LastMove)
    now_s: float = 0.0
    moves: list[tuple[float, Sizes]] = field(default_factory=list)

    def demand(self) -> Demand:
        slots, pages = self.sizes.slots, self.sizes.pages
        in_use = min(self.wanted_pages, pages)
        idle = min(self.cached_pages, pages - in_use)
        lacking = self.wanted_pages - in_use
        lost = self.cached_pages - idle
        return demand(
            steps_per_s=self.steps_per_s,
            resident=self.uses[:slots][::-1],
            absent=self.uses[slots:],
            pages_in_use=in_use,
            pages_idle=idle,
            blocked=int(lacking > 0),
            blocked_pages=lacking,
            reused_tokens_per_s=16.0 * idle / 10,
            computed_tokens_per_s=16.0 * lost / 10,
            evicted_pages_per_s=lost / 10,
        )

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            found = next_sizes(self.sizes, self.bounds, self.demand(), self.last, self.now_s)
            if found:
                assert self.bounds.bytes_of(found) <= self.bounds.budget_bytes
                self.last = LastMove(self.now_s, found.pages > self.sizes.pages)
                self.sizes = found
                self.moves.append((self.now_s, found))


@settings(deadline=None, max_examples=40)
@given(
    wanted=st.integers(0, 3000),
    cached=st.integers(0, 3000),
    pages=st.integers(8, 4000),
    steps=st.sampled_from([0.0, 1.0, 50.0, 500.0]),
)
def test_constant_demand_comes_to_rest(wanted, cached, pages, steps):
    bounds = limits()
    slots = min((bounds.budget_bytes - pages * MIB) // bounds.record_bytes, bounds.most_slots)
    server = Server(bounds, Sizes(pages, slots), steps, wanted_pages=wanted, cached_pages=cached)
    server.run(400)
    settled = len(server.moves)
    server.run(400)
    assert len(server.moves) == settled, server.moves[-4:]
    directions = [b.pages > a.pages for (_, a), (_, b) in itertools.pairwise(server.moves)]
    turns = sum(a != b for a, b in itertools.pairwise(directions))
    assert turns <= 1, server.moves


def test_long_contexts_take_from_experts_and_idle_ones_give_back():
    server = Server(limits(), Sizes(512, 448))
    server.run(60)
    quiet = server.sizes
    server.wanted_pages = 2500
    server.run(10)
    assert server.sizes.pages >= 2500 and server.sizes.slots < quiet.slots
    server.wanted_pages = 100
    server.run(300)
    assert server.sizes.slots >= quiet.slots - 40


def test_a_cache_that_is_never_asked_gives_way_to_experts_that_are_missed():
    server = Server(limits(), Sizes(3000, 137), wanted_pages=50, cached_pages=2900)
    seen = replace(server.demand(), reused_tokens_per_s=0.0)
    found = next_sizes(server.sizes, server.bounds, seen, LastMove(), 0.0)
    assert found is not None and found.slots > 137
    busy = replace(server.demand(), reused_tokens_per_s=1e6)
    assert next_sizes(server.sizes, server.bounds, busy, LastMove(), 0.0) is None


def test_nothing_moves_right_after_a_move_and_back_only_for_much():
    server = Server(limits(), Sizes(3000, 137), wanted_pages=50, cached_pages=2900)
    seen = server.demand()
    loss = loss_of_pages(seen, server.sizes, 256, TUNING)
    worth = replace(seen, miss_s=seen.miss_s * 2.5 * loss / gain_of_slots(seen, 32))
    back = LastMove(0.0, to_pages=True)
    assert next_sizes(server.sizes, server.bounds, worth, back, 1.0) is None
    assert next_sizes(server.sizes, server.bounds, worth, back, 30.0) is None
    assert next_sizes(server.sizes, server.bounds, worth, back, 61.0) is not None
    assert next_sizes(server.sizes, server.bounds, worth, LastMove(0.0, False), 30.0) is not None
