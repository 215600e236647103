"""The memory of a loaded model, which changes while it serves: ``served.Memory`` of real engines.

A change is planned first, beside the engine, and refused with a number that works; what is granted
is carried out at the engine's next safe point.
"""

from __future__ import annotations

from dataclasses import replace

from ftd.config import Config
from ftd.engine.loading import LoadedEngine, Prepared, replanner
from ftd.engine.resize import Resizing, resize
from ftd.errors import ConfigError
from ftd.lifecycle.beside import on_thread
from ftd.lifecycle.served import BudgetDone, MemoryUse
from ftd.lifecycle.succession import Footprint
from ftd.memory.budget import Bounds, plan_change, settings_for
from ftd.memory.change import Change
from ftd.memory.plan import MemoryPlan


class ElasticMemory:
    def __init__(self, config: Config, prepared: Prepared, loaded: LoadedEngine) -> None:
        self.config = config
        self.plan = prepared.plan
        self.auto = False
        self._prepared, self._engine = prepared, loaded.handle
        self._most_pages = loaded.most_pages
        # captured steps have page tables for so many
        self._most_context = self.plan.context_tokens if self.plan.vram else prepared.spec.context

    @property
    def footprint(self) -> Footprint:
        plan = self.plan
        if plan.vram:  # of host memory only the pool: the rest lies on the GPU
            return Footprint(resident_bytes=plan.pool_bytes, growth_bytes=0)
        return Footprint(
            resident_bytes=plan.dense_bytes + plan.pool_bytes,
            growth_bytes=plan.kv_bytes + plan.slots_bytes + plan.workspace_bytes,
        )

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

    async def apply(self, change: Change) -> BudgetDone:
        if change.vram == "auto" and self.plan.vram is None:
            raise ConfigError(
                "--vram auto leaves to other processes what they take of the GPU, and no GPU is "
                "in use",
                hint="use --vram SIZE",
            )
        config = settings_for(self.config, change, self.plan)
        planner = await on_thread(lambda: replanner(self._prepared))
        bounds = self._bounds()
        plan = await on_thread(lambda: plan_change(planner, config, bounds))
        done = await self._carry_out(plan)
        self.config = config
        self.auto = change.auto or (
            self.auto and change.kv_tokens is None and change.expert_slots is None
        )
        return done

    def _bounds(self) -> Bounds:
        requests = self._engine.status().requests
        return Bounds(
            longest_tokens=max((r.prompt_tokens + r.output_tokens for r in requests), default=0),
            most_vram_bytes=self.plan.most_vram_bytes,
            most_pages=self._most_pages,
            most_context_tokens=self._most_context,
        )

    async def _carry_out(self, plan: MemoryPlan) -> BudgetDone:
        before, engine = self._engine.limits, self._engine
        after = replace(before, context_tokens=plan.context_tokens, pool_tokens=plan.kv_tokens)
        # Requests that arrive from here on must fit both; what came before is in the engine first.
        engine.limits = replace(
            after,
            context_tokens=min(before.context_tokens, after.context_tokens),
            pool_tokens=min(before.pool_tokens, after.pool_tokens),
        )
        num_pages, num_slots = plan.num_pages, plan.num_slots
        try:
            done: Resizing = await engine.at_safe_point(
                lambda core: resize(core, num_pages, num_slots)
            )
        except BaseException:
            engine.limits = before
            raise
        engine.limits, self.plan = after, plan
        page = plan.page_tokens
        return BudgetDone(
            kv_tokens=done.pages * page,
            kv_tokens_were=done.pages_were * page,
            slots=done.slots,
            slots_were=done.slots_were,
            pages_evicted=done.pages_evicted,
            pages_moved=done.pages_moved,
            experts_evicted=done.experts_evicted,
            preempted=done.preempted,
            paused_s=round(done.paused_s, 6),
        )
