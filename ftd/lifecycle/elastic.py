"""The memory of a loaded model, which changes while it serves: ``served.Memory`` of real engines.

A change is planned first, beside the engine, and refused with a number that works; what is granted
is carried out at the engine's next safe point. With ``--auto`` pages and slots then share one sum
of bytes: each look may move a piece of it, and a sequence that outgrows the pool gets room at once.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import structlog
import torch

from ftd.config import Config
from ftd.engine.core import EngineCore
from ftd.engine.loading import LoadedEngine
from ftd.engine.observe import Observed, observe
from ftd.engine.preparing import Prepared, replanner
from ftd.engine.resize import Resizing, resize
from ftd.errors import BudgetExceeded
from ftd.lifecycle.beside import on_thread
from ftd.lifecycle.served import BudgetDone, MemoryUse, Reads
from ftd.lifecycle.succession import Footprint
from ftd.memory.balance import Demand, LastMove, Limits, Sizes, next_sizes, room_for
from ftd.memory.budget import Bounds, Planner, least_budget, plan_change, settings_for
from ftd.memory.change import Change
from ftd.memory.needs import MIN_CONTEXT_TOKENS
from ftd.memory.plan import MemoryPlan
from ftd.memory.vram import staging_beside
from ftd.memory.yielding import Calm, next_budget, no_gpu_to_share
from ftd.units import Amount, format_bytes

log = structlog.get_logger(__name__)

# Where no profile tells what a miss costs: its record over a link of PCIe 5 x16, as measured on the
# H200 machine. On the CPU device a miss costs no more than a hit; there memory only stands in for a
# GPU's.
LINK_BYTES_PER_S = 45e9
AHEAD_PAGES = 32  # more than a sequence needs just now: it grows on


class ElasticMemory:
    def __init__(self, config: Config, prepared: Prepared, loaded: LoadedEngine) -> None:
        self.config = config
        self.shared: Limits | None = None  # what pages and slots share by need
        self._plan = prepared.plan
        self._prepared, self._engine = prepared, loaded.handle
        self._most_pages = loaded.most_pages
        # captured steps have page tables for so many
        self._most_context = self._plan.context_tokens if self._plan.vram else prepared.spec.context
        self._yields = config.vram == "auto"  # to what other processes take of the GPU
        self._calm = Calm()
        self._refused = ""  # the last reason for which others got no memory, or took none
        self._changing = asyncio.Lock()
        self._seen: Observed | None = None
        self._last = LastMove()

    # ---- what it is

    @property
    def auto(self) -> bool:
        return self.shared is not None

    @property
    def moves(self) -> bool:
        return self.auto or self._yields

    @property
    def plan(self) -> MemoryPlan:
        """As of now: where memory follows need, sizes are those of the engine."""
        status = self._engine.status()
        if self.shared is None:
            return self._plan
        return self._plan.resized(status.pages_total, status.slots_total)

    @property
    def footprint(self) -> Footprint:
        plan = self._plan
        if plan.vram:  # of host memory the pool and what is pinned by and by; the rest is the GPU's
            return Footprint(resident_bytes=plan.pool_bytes, growth_bytes=plan.host_kv_bytes)
        return Footprint(
            resident_bytes=plan.dense_bytes + plan.pool_bytes,
            growth_bytes=plan.kv_bytes + plan.slots_bytes + plan.workspace_bytes,
        )

    @property
    def reads(self) -> Reads:
        plan = self._plan
        return Reads(plan.record_bytes, plan.dense_bytes, plan.vram is not None)

    def table(self) -> str:
        return self.plan.table()

    def uses(self) -> tuple[MemoryUse, ...]:
        status = self._engine.status()
        shares = {
            "KV pool": (status.pages_held, status.pages_total),
            "expert slots": (status.slots_used, status.slots_total),
        }
        found = []
        for name, num_bytes, note in self.plan.device_rows():
            part, whole = shares.get(name, (1, 1))
            found.append(MemoryUse(name, num_bytes, num_bytes * part // max(1, whole), note))
        return tuple(found)

    # ---- changes that are asked for

    async def apply(self, change: Change) -> BudgetDone:
        async with self._changing:
            return await self._apply(change)

    async def _apply(self, change: Change) -> BudgetDone:
        if change.vram == "auto" and self._plan.vram is None:
            raise no_gpu_to_share()
        config = settings_for(self.config, change, self.plan)
        numbers = change.kv_tokens is not None or change.expert_slots is not None
        auto = change.auto or (self.auto and not numbers)
        planner = await on_thread(lambda: replanner(self._prepared))
        longest = await self._engine.at_safe_point(_longest_tokens)
        bounds = await on_thread(lambda: self._bounds(planner, longest))
        plan = await on_thread(lambda: plan_change(planner, config, bounds))
        shared = self._shared(config, plan) if auto else None
        if shared:
            plan = self._as_it_is(plan, shared, longest)
        done = await self._carry_out(plan, shared)
        self.config, self._plan, self.shared, self._seen = config, plan, shared, None
        if change.vram is not None:
            self._yields = change.vram == "auto"
        return done

    def _bounds(self, planner: Planner, longest_tokens: int) -> Bounds:
        least = replace(self.config, vram=None, kv_tokens="auto", expert_slots=0)
        try:
            most_vram_bytes = planner(least).most_vram_bytes
        except BudgetExceeded:  # nobody would start now: others have come since
            most_vram_bytes = self._plan.most_vram_bytes
        return Bounds(
            longest_tokens=longest_tokens,
            most_vram_bytes=most_vram_bytes,
            most_pages=self._most_pages,
            most_context_tokens=self._most_context,
        )

    def _shared(self, config: Config, plan: MemoryPlan) -> Limits:
        budget = plan.kv_bytes + plan.slots_bytes
        if plan.vram:
            budget += plan.vram.budget_bytes - plan.vram.total_bytes
        elif isinstance(config.vram, Amount):
            budget = config.vram.of(plan.most_vram_bytes)
        least = MIN_CONTEXT_TOKENS if config.context == "auto" else config.context
        staging_bytes = self._staging_to_come(plan) * plan.record_bytes
        return Limits(
            budget_bytes=budget,
            page_bytes=plan.page_bytes,
            record_bytes=plan.record_bytes,
            least_pages=-(-least // plan.page_tokens),
            most_pages=min(self._most_pages, (budget - staging_bytes) // plan.page_bytes),
            most_slots=plan.num_experts,
            staging_bytes=staging_bytes,
        )

    def _staging_to_come(self, plan: MemoryPlan) -> int:
        """Records of the staging area that a plan has none of, since all experts have slots."""
        if plan.vram is None or plan.vram.staging_records:
            return 0
        moe_layers = len(self._prepared.spec.moe_layers)
        per_layer = plan.num_experts // moe_layers
        return staging_beside(plan.slots_bytes, plan.record_bytes, per_layer)

    def _as_it_is(self, plan: MemoryPlan, shared: Limits, longest_tokens: int) -> MemoryPlan:
        """Present sizes as far as the budget goes: what they should be is seen while serving."""
        status = self._engine.status()
        pages = max(status.pages_total, longest_tokens // plan.page_tokens + 1, shared.least_pages)
        pages = min(pages, shared.most_pages)
        left = shared.budget_bytes - pages * shared.page_bytes
        return plan.resized(pages, min(status.slots_total, shared.slots_in(left)))

    async def _carry_out(self, plan: MemoryPlan, shared: Limits | None) -> BudgetDone:
        before, engine = self._engine.limits, self._engine
        pool_tokens, context = plan.kv_tokens, plan.context_tokens
        if shared:  # the pool grows to what a sequence needs
            pool_tokens = shared.most_pages * plan.page_tokens
            longest = self._most_context if self.config.context == "auto" else self.config.context
            context = min(longest, pool_tokens)
        after = replace(before, context_tokens=context, pool_tokens=pool_tokens)
        # Requests that arrive from here on must fit both; what came before is in the engine first.
        engine.limits = replace(
            after,
            context_tokens=min(before.context_tokens, after.context_tokens),
            pool_tokens=min(before.pool_tokens, after.pool_tokens),
        )

        def change(core: EngineCore) -> Resizing:
            records, chunk = staging(plan, shared), plan.prefill_chunk
            done = resize(core, plan.num_pages, plan.num_slots, records, chunk)
            core.held.most_pages = shared.most_pages if shared else 0
            if shared:
                core.make_room = lambda pages: _make_room(core, pages, plan, shared)
            return done

        try:
            done: Resizing = await engine.at_safe_point(change)
        except BaseException:
            engine.limits = before
            raise
        engine.limits = after
        return _told(done, plan.page_tokens)

    # ---- changes that follow need

    async def rebalance(self) -> BudgetDone | None:
        """Look at what memory is worth where, and move a piece of it if that pays."""
        async with self._changing:
            if self._yields and (yielded := await self._yield()):
                return yielded
            if self.shared is None:
                return None
            before, seen = self._seen, await self._engine.at_safe_point(observe)
            self._seen = seen
            if before is None:
                return None
            sizes = Sizes(seen.pages, seen.slots)
            demand = demand_between(before, seen, self._plan)
            found = next_sizes(sizes, self.shared, demand, self._last, seen.at_s)
            if found is None:
                return None
            staged = staging(self._plan.resized(found.pages, found.slots), self.shared)
            done: Resizing = await self._engine.at_safe_point(
                lambda core: resize(core, found.pages, found.slots, staged)
            )
            self._last = LastMove(seen.at_s, found.pages > sizes.pages)
            return _told(done, self._plan.page_tokens)

    async def _yield(self) -> BudgetDone | None:
        """Follow what other processes leave of the GPU."""
        gpu, used = self._plan.vram, self.plan.vram
        assert gpu is not None and used is not None
        free, total = await on_thread(lambda: torch.cuda.mem_get_info(gpu.gpu.index))
        budget, self._calm = next_budget(
            gpu.budget_bytes, used.total_bytes, free, total, self._calm, time.monotonic()
        )
        if budget is None:
            return None
        try:
            done = await self._apply(Change(vram=Amount(bytes=budget)))
        except BudgetExceeded as refusal:  # by what runs, or what the model needs
            least = await self._least_budget(budget)
            if least is None or not budget < least < gpu.budget_bytes:
                self._tell_once(refusal, budget)
                return None
            done = await self._apply(Change(vram=Amount(bytes=least)))
        self._yields = True
        return done

    def _tell_once(self, refusal: BudgetExceeded, budget: int) -> None:
        if self._refused != refusal.message:
            self._refused = refusal.message
            log.warning("budget.not_yielded", wanted=format_bytes(budget), reason=refusal.message)

    async def _least_budget(self, above: int) -> int | None:
        planner = await on_thread(lambda: replanner(self._prepared))
        longest = await self._engine.at_safe_point(_longest_tokens)
        bounds = await on_thread(lambda: self._bounds(planner, longest))
        return await on_thread(lambda: least_budget(planner, self.config, bounds, above))


def demand_between(before: Observed, now: Observed, plan: MemoryPlan) -> Demand:
    seconds = max(1e-3, now.at_s - before.at_s)
    return Demand(
        steps_per_s=(now.steps - before.steps) / seconds,
        miss_s=now.miss_s or plan.record_bytes / LINK_BYTES_PER_S,
        resident=now.resident,
        absent=now.absent,
        empty_slots=now.empty_slots,
        pages_in_use=now.pages_in_use,
        pages_idle=now.pages_idle,
        blocked=now.blocked,
        blocked_pages=now.blocked_pages,
        token_s=now.token_s,
        page_tokens=plan.page_tokens,
        computed_tokens_per_s=(now.prompt_tokens - before.prompt_tokens) / seconds,
        reused_tokens_per_s=(now.reused_tokens - before.reused_tokens) / seconds,
        evicted_pages_per_s=(now.evicted_pages - before.evicted_pages) / seconds,
    )


def staging(plan: MemoryPlan, shared: Limits | None) -> int:
    """Records of the staging area with the plan's slots."""
    planned = plan.vram.staging_records if plan.vram else 0
    more = shared.staging_of(plan.num_slots) if shared else 0
    return planned + more // plan.record_bytes


def _longest_tokens(core: EngineCore) -> int:
    return core.roster.longest_tokens()


def _make_room(core: EngineCore, pages: int, plan: MemoryPlan, shared: Limits) -> None:
    """On the engine thread, between two steps: a sequence needs more pages than there are."""
    sizes = Sizes(core.pages.num_pages, core.experts.counters().slots_total)
    found = room_for(pages + AHEAD_PAGES, sizes, shared)
    resize(core, found.pages, found.slots, staging(plan.resized(found.pages, found.slots), shared))
    log.info("budget.made_room", pages=found.pages, slots=found.slots, slots_were=sizes.slots)


def _told(done: Resizing, page_tokens: int) -> BudgetDone:
    return BudgetDone(
        kv_tokens=done.pages * page_tokens,
        kv_tokens_were=done.pages_were * page_tokens,
        slots=done.slots,
        slots_were=done.slots_were,
        pages_evicted=done.pages_evicted,
        pages_moved=done.pages_moved,
        experts_evicted=done.experts_evicted,
        preempted=done.preempted,
        paused_s=round(done.paused_s, 6),
    )
