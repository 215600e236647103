"""KV pages and expert slots change their number at a safe point, while requests go on.

What shrinks goes first, so memory never exceeds the larger of both sizes. Pages that are given up
are those of the prefix cache that are worth least, then those of the youngest sequences, which
continue later with equal tokens; what stays and lies beyond the new end is moved. No weight is read
again: slots are filled from the host pool as steps miss.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, replace

import torch

from ftd.engine.core import EngineCore
from ftd.errors import BudgetExceeded
from ftd.units import GiB, format_count

SAVED_AT_ONCE_BYTES = 1 * GiB  # to host memory, while all wait: 20 ms at 50 GB/s


@dataclass(frozen=True, slots=True)
class Resizing:
    """What a change of budget did."""

    pages: int
    pages_were: int
    slots: int
    slots_were: int
    pages_evicted: int  # of the prefix cache
    pages_moved: int
    experts_evicted: int
    preempted: int  # sequences that continue later
    paused_s: float


def resize(
    core: EngineCore,
    num_pages: int,
    num_slots: int,
    num_staging: int | None = None,
    chunk_tokens: int | None = None,
) -> Resizing:
    """Change both numbers, on the engine thread with nothing in flight.

    Args:
        num_staging: records of experts on their way to a GPU; None: as many as there are.
        chunk_tokens: of a prompt in one step from now on; None: as it is.
    Raises:
        BudgetExceeded: a request is under way that is longer than the new pool; nothing changed.
    """
    _refuse_too_small(core, num_pages)
    if chunk_tokens is not None and chunk_tokens != core.limits.chunk_tokens:
        if chunk_tokens < core.limits.chunk_tokens:
            torch.cuda.empty_cache()  # what longer ones have used; without a GPU nothing
        core.limits = replace(core.limits, chunk_tokens=chunk_tokens)
    try:
        return _resize(core, num_pages, num_slots, num_staging)
    finally:
        core.kv.trim()


def _resize(core: EngineCore, num_pages: int, num_slots: int, num_staging: int | None) -> Resizing:
    began_s = time.monotonic()
    pages_were, slots_were = core.pages.num_pages, core.experts.counters().slots_total
    experts_evicted = 0
    if num_slots < slots_were:
        experts_evicted = len(core.experts.resize(num_slots, num_staging).evicted)
    preempted = evicted = moved = 0
    if num_pages != pages_were:
        preempted, evicted, moved = _resize_pages(core, num_pages)
    if num_slots > slots_were:
        core.experts.resize(num_slots, num_staging)
    return Resizing(
        num_pages,
        pages_were,
        num_slots,
        slots_were,
        evicted,
        moved,
        experts_evicted,
        preempted,
        time.monotonic() - began_s,
    )


def _refuse_too_small(core: EngineCore, num_pages: int) -> None:
    tokens, longest = num_pages * core.kv.page_tokens, core.roster.longest_tokens()
    if longest >= tokens:
        least = (longest // core.kv.page_tokens + 1) * core.kv.page_tokens
        raise BudgetExceeded(
            f"a request under way has {format_count(longest)} tokens, the KV pool would hold "
            f"{format_count(tokens)}",
            hint=f"use --kv-tokens {least} or more, or wait until it has ended",
        )


def _resize_pages(core: EngineCore, num_pages: int) -> tuple[int, int, int]:
    """Numbers of sequences preempted, cached pages evicted, and pages moved."""
    pages, preempted = core.pages, 0
    running = core.roster.oldest_running()
    while pages.held - pages.idle > num_pages:
        core.roster.preempt(running.pop().key)
        preempted += 1
    excess = max(0, pages.held - num_pages)
    saved = min(excess, SAVED_AT_ONCE_BYTES // core.kv.page_bytes)  # of the highest rank among them
    evicted = core.tree.forget(excess - saved) + core.tree.evict(saved)
    moves = pages.resize(num_pages)
    core.kv.move(moves)
    if moves:
        to = dict(moves)
        core.tree.renumber(to)
        for sequence in running:
            sequence.pages = array("i", [to.get(page, page) for page in sequence.pages])
    core.kv.resize(num_pages)
    core.limits = replace(core.limits, num_pages=num_pages)
    return preempted, evicted, len(moves)
