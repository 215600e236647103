"""Who gets how much of the GPU's memory: pure, a part of ``ftd.memory.planner``.

``--vram`` is everything the driver shows for the process: context and libraries, dense weights,
workspace of a step, recurrent states of running sequences, staging for prefill, KV, and expert
slots with whatever is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from ftd.config import Config, flag
from ftd.errors import BudgetExceeded
from ftd.memory import yielding
from ftd.memory.machine import Gpu
from ftd.units import MiB, format_bytes, format_count, size_above, size_below

# Context, code of all kernels, library handles, graphs: measured on the H200 machine, CUDA 13.
OVERHEAD_BYTES = 1024 * MiB
# What slots, staging and KV pages are mapped in: 7 GiB in 9 ms on the H200 machine; by 2 MiB, the
# driver's granularity, in 280.
CHUNK_BYTES = 32 * MiB
CHUNKED_RANGES = 3  # slots, staging, KV: the last chunk of each is used in part
SPARE_BYTES = 512 * MiB  # left to the desktop and others where nobody gave a budget
SPARE_SHARE = 0.03
SAMPLED_ROWS = 8  # for which the sampler has counts, biases and room, however few run
KV_SHARE = 0.25  # of what KV and slots may have, for a pool that nobody sized
STAGING_SHARE = 0.12  # of the same, at most, for the staging area


@dataclass(frozen=True, slots=True)
class VramPlan:
    """The GPU's side of a ``MemoryPlan``: bytes, which add up to no more than the budget."""

    gpu: Gpu
    budget_bytes: int
    overhead_bytes: int
    dense_bytes: int
    workspace_bytes: int
    staging_records: int
    staging_bytes: int
    kv_bytes: int
    slots_bytes: int
    num_states: int = 0  # recurrent ones, of running sequences
    states_bytes: int = 0
    window_bytes: int = 0  # of layers with pages of their own

    @property
    def total_bytes(self) -> int:
        return self.window_bytes + sum(num_bytes for _, num_bytes, _ in self.rows("", ""))

    def rows(
        self, kv_note: str, slots_note: str, window_rows: Sequence[tuple[str, int, str]] = ()
    ) -> list[tuple[str, int, str]]:
        return [
            ("CUDA", self.overhead_bytes, "context, kernels, library handles, graphs"),
            ("dense weights", self.dense_bytes, "attention, norms, routers, embedding, head"),
            ("workspace", self.workspace_bytes, "of one step"),
            *self._state_rows(),
            *window_rows,
            ("staging", self.staging_bytes, f"{self.staging_records} experts on their way"),
            ("KV pool", self.kv_bytes, kv_note),
            ("expert slots", self.slots_bytes, slots_note),
        ]

    def _state_rows(self) -> list[tuple[str, int, str]]:
        if not self.num_states:
            return []
        each = format_bytes(self.states_bytes // self.num_states)
        note = f"{format_count(self.num_states)} of {each}: of running sequences"
        return [("states", self.states_bytes, note)]


@dataclass(frozen=True, slots=True)
class Division:
    """What is left for KV, staging and slots, and how it is divided."""

    num_pages: int
    num_slots: int
    staging_records: int


def budget_bytes(config: Config, gpu: Gpu) -> int:
    """What the process may take of the GPU.

    Raises:
        BudgetExceeded: more than the GPU has free.
    """
    if config.vram == "auto":  # as much stays free as is kept free from then on
        return max(0, gpu.free_bytes - yielding.SPARE_BYTES)
    if config.vram is None:
        return gpu.free_bytes - max(SPARE_BYTES, int(SPARE_SHARE * gpu.total_bytes))
    budget = config.vram.of(gpu.total_bytes)
    if budget > gpu.free_bytes:
        raise BudgetExceeded(
            f"{config.named('vram')}: {format_bytes(budget)}, of which {gpu.name} has "
            f"{format_bytes(gpu.free_bytes)} free",
            hint=f"use {flag('vram')} {size_below(gpu.free_bytes)} or less, "
            "or end what else uses the GPU",
        )
    return budget


def divide(
    config: Config,
    *,
    room_bytes: int,
    fixed_bytes: int,
    states_bytes: int,  # of those, what goes with the number of running sequences
    page_bytes: int,
    page_tokens: int,
    least_pages: int,  # for the shortest context worth serving, or the one asked for
    wanted_pages: int,  # for all that may run, if there is plenty
    record_bytes: int,
    experts_per_layer: int,
    num_experts: int,
) -> Division:
    """Divide ``room_bytes``: explicit numbers win, then all experts, then KV by its share.

    Raises:
        BudgetExceeded: even the least does not fit.
    """
    asked = None if config.expert_slots == "auto" else config.expert_slots
    if config.kv_tokens != "auto":
        pages = -(-config.kv_tokens // page_tokens)
    else:
        left = room_bytes - (asked or 0) * record_bytes
        spare = room_bytes - num_experts * record_bytes  # beside a model that fits as a whole
        share = max(int(KV_SHARE * left), spare if asked is None else 0)
        pages = max(least_pages, min(wanted_pages, share // page_bytes))
    left = room_bytes - pages * page_bytes
    if left < (asked or 0) * record_bytes:
        _refuse(room_bytes + fixed_bytes, fixed_bytes, states_bytes, pages * page_bytes,
                (asked or 0) * record_bytes)  # fmt: skip
    if (num_experts if asked is None else asked) == num_experts <= left // record_bytes:
        return Division(pages, num_experts, 0)  # nothing is ever missed
    most = min(int(STAGING_SHARE * left), left - (asked or 0) * record_bytes)
    staging = max(0, min(experts_per_layer, most // record_bytes))
    if asked is not None:
        return Division(pages, asked, staging)
    return Division(pages, min(num_experts, left // record_bytes - staging), staging)


def _refuse(budget: int, fixed: int, states: int, kv: int, slots: int) -> NoReturn:
    parts = f"{format_bytes(fixed)} beside KV and slots, {format_bytes(kv)} of KV"
    if slots:
        parts += f", {format_bytes(slots)} of expert slots"
    need = fixed + kv + slots
    fewer = f", or {flag('max_running')}: {format_bytes(states)} are for it" if states else ""
    raise BudgetExceeded(
        f"the GPU needs {format_bytes(need)} ({parts}), {format_bytes(budget)} is its budget",
        hint=f"use {flag('vram')} {size_above(need)} or more, "
        f"or lower {flag('kv_tokens')} or {flag('expert_slots')}{fewer}",
    )


def staging_beside(slots_bytes: int, record_bytes: int, experts_per_layer: int) -> int:
    """Records of a staging area that comes out of what slots have, once experts leave theirs."""
    return min(experts_per_layer, int(STAGING_SHARE * slots_bytes) // record_bytes)


def could_hold_all(plan: VramPlan, pool_bytes: int) -> bool:
    """Whether a larger budget could give every expert a slot."""
    others = plan.total_bytes - plan.slots_bytes - plan.staging_bytes
    return others + pool_bytes <= plan.gpu.total_bytes


def notes(num_slots: int, num_experts: int) -> str:
    if num_slots == num_experts:
        return f"all {format_count(num_experts)} experts: nothing goes over the link"
    return f"{format_count(num_slots)} of {format_count(num_experts)} experts"
