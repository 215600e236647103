"""Who gets how much memory: a pure function from model, settings and machine to bytes.

    weights, workspace, headroom      what the model needs whatever is asked
    KV pool, expert slots             what is chosen: explicit numbers win, "auto" takes a share

On the CPU device all of it is ordinary memory. With a GPU the host keeps the pool of experts, and
``ftd.memory.vram`` divides the GPU's. What does not fit is refused with the setting to change and a
value that works.
"""

from __future__ import annotations

from typing import NoReturn

from ftd.config import Config, flag
from ftd.errors import BudgetExceeded, ConfigError
from ftd.kernels.formats import ExpertLayout
from ftd.memory import vram
from ftd.memory.machine import Gpu, Machine
from ftd.memory.needs import MIN_CONTEXT_TOKENS, PAGE_TOKENS, Needs, pages_for
from ftd.memory.plan import MemoryPlan
from ftd.memory.yielding import no_gpu_to_share
from ftd.model.spec import ModelSpec, MoeSpec
from ftd.units import format_bytes, format_count, parse_size, size_above, size_below

MODERATE_TOKENS = 16384  # what one sequence of an agent often needs; times --max-running
KV_SHARE = 0.5  # of the free memory, at most, for a KV pool that nobody sized
KEPT_STATES = 16  # for each running sequence, to resume from: some conversations' borders
KEPT_STATES_SHARE = 0.25  # of the free memory, at most, for those
HOST_KV_SHARE = 0.25  # of what is free beside the experts, for KV evicted from a GPU ...
HOST_KV_TIMES = 4  # ... and at most so many times what the GPU has


def plan_memory(
    spec: ModelSpec,
    layout: ExpertLayout,
    dense_bytes: int,
    config: Config,
    machine: Machine,
    gpu: Gpu | None = None,
    started: MemoryPlan | None = None,
) -> MemoryPlan:
    """Divide the available memory, and the GPU's where one computes.

    Args:
        dense_bytes: of all weights that are no routed expert's, as stored.
        started: the plan of a model that serves already: its states and the pages of its windows
            stay as they are, and no chunk is longer than the kernels were made ready for.
        config: dtype, context, kv_tokens, vram, expert_slots, prefill_chunk, max_running are read.
    Raises:
        BudgetExceeded: it does not fit; the hint has the setting to change and to what.
        ConfigError: a number that this model cannot have, whatever the memory.
    """
    needs = Needs.of(spec, layout, dense_bytes, config, gpu, started)
    return _Planner(needs, config, machine, gpu, started.num_states if started else None).plan()


class _Planner:
    def __init__(
        self,
        needs: Needs,
        config: Config,
        machine: Machine,
        gpu: Gpu | None = None,
        num_states: int | None = None,
    ) -> None:
        self.needs, self.config, self.machine, self.gpu = needs, config, machine, gpu
        self.num_states = num_states

    def plan(self) -> MemoryPlan:
        self._refuse_impossible()
        needs, config = self.needs, self.config
        if self.gpu:
            return self._plan_gpu(self.gpu)
        free = self._free_beside_weights()
        kept = self._kept_states(free)
        budget = self._budget(free - kept * needs.state_bytes)
        pages = self._pages(budget)
        slots = self._slots(budget - pages * needs.page_bytes)
        limit = min(needs.spec.context, pages * PAGE_TOKENS)
        context = limit if config.context == "auto" else config.context
        return self._memory_plan(
            context_tokens=context,
            num_pages=pages,
            num_slots=slots,
            num_states=needs.live_states + kept,
            workspace_bytes=needs.workspace_bytes,
        )

    def _memory_plan(
        self,
        *,
        context_tokens: int,
        num_pages: int,
        num_slots: int,
        num_states: int,
        workspace_bytes: int,
        host_kv_bytes: int = 0,
        on_gpu: vram.VramPlan | None = None,
    ) -> MemoryPlan:
        """What was chosen, beside what the model needs in any case."""
        needs = self.needs
        return MemoryPlan(
            context_tokens=context_tokens,
            page_tokens=PAGE_TOKENS,
            num_pages=num_pages,
            num_slots=num_slots,
            num_experts=needs.num_experts,
            prefill_chunk=needs.chunk,
            dense_bytes=needs.dense_bytes,
            pool_bytes=needs.pool_bytes,
            workspace_bytes=workspace_bytes,
            headroom_bytes=needs.headroom_bytes,
            kv_bytes=num_pages * needs.page_bytes,
            slots_bytes=num_slots * needs.record_bytes,
            available_bytes=self.machine.available_bytes,
            limited_by=self.machine.limited_by,
            host_kv_bytes=host_kv_bytes,
            num_states=num_states,
            states_bytes=num_states * needs.state_bytes,
            windowing=needs.windowing,
            num_window_pages=needs.num_window_pages,
            window_bytes=needs.window_bytes,
            vram=on_gpu,
        )

    def _kept_states(self, free: int) -> int:
        """Recurrent states to resume from. Not part of the budget, which may change later."""
        needs = self.needs
        if not needs.state_bytes:
            return 0
        if self.num_states is not None:
            return self.num_states - needs.live_states
        room = min(KEPT_STATES_SHARE * free, free - needs.least_kv_bytes)
        return min(KEPT_STATES * self.config.max_running, int(room) // needs.state_bytes)

    def _plan_gpu(self, gpu: Gpu) -> MemoryPlan:
        """The host keeps the pool; everything else lies on the GPU."""
        needs, config = self.needs, self.config
        on_host = needs.pool_bytes + needs.headroom_bytes
        self._refuse_too_little(needs.pool_bytes, on_host)
        kept = self._kept_states(self.machine.available_bytes - on_host)
        mlp = needs.spec.layers[needs.spec.moe_layers[0]].mlp
        assert isinstance(mlp, MoeSpec)
        unused = (vram.CHUNKED_RANGES + bool(needs.live_states)) * vram.CHUNK_BYTES
        workspace = needs.workspace_bytes + unused
        states_bytes = needs.live_states * needs.state_bytes
        fixed = vram.OVERHEAD_BYTES + needs.dense_bytes + workspace + states_bytes
        fixed += needs.window_bytes
        budget = vram.budget_bytes(config, gpu)
        context = needs.spec.context if config.context == "auto" else config.context
        found = vram.divide(
            config,
            room_bytes=budget - fixed,
            fixed_bytes=fixed,
            states_bytes=states_bytes + needs.window_bytes,
            page_bytes=needs.page_bytes,
            page_tokens=PAGE_TOKENS,
            least_pages=pages_for(MIN_CONTEXT_TOKENS if config.context == "auto" else context),
            wanted_pages=config.max_running * pages_for(min(context, MODERATE_TOKENS)),
            record_bytes=needs.record_bytes,
            experts_per_layer=mlp.num_experts,
            num_experts=needs.num_experts,
        )
        kv_bytes = found.num_pages * needs.page_bytes
        on_gpu = vram.VramPlan(
            gpu,
            budget,
            vram.OVERHEAD_BYTES,
            needs.dense_bytes,
            workspace,
            found.staging_records,
            found.staging_records * needs.record_bytes,
            kv_bytes,
            found.num_slots * needs.record_bytes,
            needs.live_states,
            states_bytes,
            needs.window_bytes,
        )
        return self._memory_plan(
            context_tokens=min(context, found.num_pages * PAGE_TOKENS),
            num_pages=found.num_pages,
            num_slots=found.num_slots,
            num_states=needs.live_states + kept,
            workspace_bytes=workspace,
            host_kv_bytes=self._host_kv(kv_bytes, on_host + kept * needs.state_bytes),
            on_gpu=on_gpu,
        )

    def _host_kv(self, kv_bytes: int, others_bytes: int) -> int:
        """Bytes of whole pages of the tier below the GPU's KV.

        Args:
            others_bytes: of host memory, that are for something else.
        """
        needs, asked = self.needs, self.config.host_kv
        free = self.machine.available_bytes - others_bytes
        if asked == "auto":
            most = min(int(HOST_KV_SHARE * free), HOST_KV_TIMES * kv_bytes)
            return most // needs.page_bytes * needs.page_bytes
        if asked > free:
            self._refuse(
                "host_kv",
                f"{format_bytes(free)} is free beside the experts",
                f"use {flag('host_kv')} {size_below(free)} or less",
            )
        return asked // needs.page_bytes * needs.page_bytes

    def _refuse_impossible(self) -> None:
        """Numbers that are wrong for this model on any machine."""
        context, slots = self.config.context, self.config.expert_slots
        if self.gpu is None and self.config.host_kv not in ("auto", 0):
            raise ConfigError(
                f"{self.config.named('host_kv')}: it keeps KV that is evicted from a GPU; on the "
                "CPU device KV is in host memory already",
                hint=f"leave it out, or use {flag('kv_tokens')}",
            )
        if context != "auto" and context > self.needs.spec.context:
            raise ConfigError(
                f"{self.config.named('context')}: the model was trained for at most "
                f"{self.needs.spec.context} tokens",
                hint=f"use {flag('context')} {self.needs.spec.context} or less",
            )
        if slots != "auto" and slots > self.needs.num_experts:
            raise ConfigError(
                f"{self.config.named('expert_slots')}: the model has {self.needs.num_experts} "
                "experts",
                hint=f"use {flag('expert_slots')} {self.needs.num_experts} or less",
            )

    def _free_beside_weights(self) -> int:
        needs = self.needs
        weights = needs.dense_bytes + needs.pool_bytes
        self._refuse_too_little(weights, needs.fixed_bytes + needs.least_kv_bytes)
        return self.machine.available_bytes - needs.fixed_bytes

    def _refuse_too_little(self, weights: int, least: int) -> None:
        available = self.machine.available_bytes
        if least > available:
            raise BudgetExceeded(
                f"the model needs {format_bytes(least)} of memory "
                f"({format_bytes(weights)} of weights), "
                f"{format_bytes(available)} is available, limited by {self.machine.limited_by}",
                hint=f"free or add {format_bytes(least - available)}, raise the memory limit of "
                f"ftd so that {size_above(least)} are available{self._fewer_states()}, or serve a "
                "smaller model",
            )

    def _fewer_states(self) -> str:
        """What to change where much of the memory is for states of running sequences."""
        states = self.needs.live_states * self.needs.state_bytes
        return f", lower {flag('max_running')}: {format_bytes(states)} are for it" if states else ""

    def _budget(self, free: int) -> int:
        """Bytes for KV and slots."""
        vram = self.config.vram
        if vram is None:
            return free
        if vram == "auto":
            raise no_gpu_to_share()
        budget = vram.of(free)
        if budget > free:
            said = f"{format_bytes(free)} is free beside the weights"
            most = size_below(free)
            if parse_size(most) < self.needs.least_kv_bytes:
                most = str(free)
            self._refuse("vram", said, f"use {flag('vram')} {most} or less")
        return budget

    def _pages(self, budget: int) -> int:
        """Pages of the KV pool in what explicit slots leave of the budget."""
        kv_tokens, context = self.config.kv_tokens, self.config.context
        room = budget - self._asked_slots() * self.needs.record_bytes
        fit = max(0, room // self.needs.page_bytes)
        if kv_tokens != "auto":
            needed = pages_for(kv_tokens)
        else:
            needed = pages_for(MIN_CONTEXT_TOKENS if context == "auto" else context)
        if needed > fit:
            self._refuse_kv(needed, fit, budget)
        if kv_tokens != "auto":
            return needed
        longest = self.needs.spec.context if context == "auto" else context
        one = pages_for(longest)
        many = self.config.max_running * pages_for(min(longest, MODERATE_TOKENS))
        share = int(KV_SHARE * budget) // self.needs.page_bytes
        # one whole context whatever its share; more than that only within the share
        return max(needed, min(one, fit), min(many, share, fit))

    def _slots(self, room: int) -> int:
        if self.config.expert_slots == "auto" and self.config.vram is not None:
            return min(self.needs.num_experts, room // self.needs.record_bytes)
        return self._asked_slots()

    def _asked_slots(self) -> int:
        slots = self.config.expert_slots
        return 0 if slots == "auto" else slots

    def _refuse_kv(self, pages: int, fit: int, budget: int) -> NoReturn:
        """KV does not fit. Which number is it: the budget, the slots, or the tokens?"""
        least, record = self.needs.least_kv_bytes, self.needs.record_bytes
        need, slots = pages * self.needs.page_bytes, self._asked_slots()
        if budget < least:
            hint = f"use {flag('vram')} {size_above(least)} or more"
            hint += f", with {flag('expert_slots')} 0" if slots else ""
            self._refuse("vram", f"KV needs at least {format_bytes(least)}", hint)
        if fit < pages_for(MIN_CONTEXT_TOKENS):
            most = (budget - (need if need <= budget else least)) // record
            said = f"they need {format_bytes(slots * record)}, {format_bytes(budget)} is there"
            self._refuse(
                "expert_slots", f"{said} for slots and KV", f"use {flag('expert_slots')} {most}"
            )
        name = "context" if self.config.kv_tokens == "auto" else "kv_tokens"
        tokens, context = fit * PAGE_TOKENS, self.config.context
        hint = f"use {flag(name)} {tokens} or less"
        if name == "kv_tokens" and context != "auto" and context > tokens:
            hint += f", with {flag('context')} {tokens} or less"
        said = f"{format_count(pages * PAGE_TOKENS)} tokens of KV need {format_bytes(need)}"
        self._refuse(name, f"{said}, {format_bytes(fit * self.needs.page_bytes)} is left", hint)

    def _refuse(self, name: str, said: str, hint: str) -> NoReturn:
        raise BudgetExceeded(f"{self.config.named(name)}: {said}", hint=hint)
