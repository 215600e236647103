"""The routed experts while steps run: where each is, what a miss costs, what comes in.

Residency does not change while a decode step runs. ``forward`` computes every route where the
weights are, slot or host record, and copies some of the missed records into empty slots on the
way; ``safe_point`` makes those resident, evicts, and empties slots for the next step. So an answer
is the same for any number of slots.

A pass over prompts may pause within a layer for decode steps of others (``within_pass``), each with
a safe point of its own. Then what has come in becomes resident, and nothing leaves.

The CPU device: slots are ordinary memory, both paths of a miss are the same kernel, and a read over
the link is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from ftd.experts import policy
from ftd.experts.host_pool import HostPool
from ftd.experts.pause import NO_PAUSE, Pause
from ftd.experts.slots import EMPTY, Resized, SlotMemory, SlotTable
from ftd.experts.split import Allowance, PromptRates
from ftd.experts.trace import TraceRecorder
from ftd.kernels.formats import ExpertLayout
from ftd.kernels.ops import Ops
from ftd.model.spec import ModelSpec, MoeSpec

DECODE_TOKENS = 8  # the largest decode batch: a step with more rows is a prefill

# A background fill is a copy of one record, about what computing a miss reads.
CPU_ALLOWANCE = Allowance(fills=1.0, cost_misses=1.0)


@dataclass(frozen=True, slots=True)
class ExpertCounters:
    """Since start. Steps that were abandoned are not in it."""

    hits: int = 0  # (step, layer, distinct expert) found in a slot
    misses: int = 0
    fetched: int = 0  # misses whose path was the link
    on_cpu: int = 0  # misses computed where they are
    evicted: int = 0
    ahead: int = 0  # records streamed before the layer of a prompt had chosen its experts
    ahead_unused: int = 0  # of these, how many it did not choose: bytes for nothing
    fills: int = 0  # records that became resident, read through or in the background
    fill_bytes: int = 0
    slots_total: int = 0  # gauge
    slots_used: int = 0  # gauge


@dataclass(frozen=True, slots=True)
class ResidencyMap:
    """For ``ftctl experts``: a copy, as of the safe point at which it was taken."""

    layers: tuple[int, ...]  # among all layers of the model
    slot: np.ndarray  # [L, E] int32, -1: not resident
    value: np.ndarray  # [L, E] float32, expected uses per step


@dataclass(slots=True)
class _Step:
    """What the running step did so far; nothing of it counts before the next safe point."""

    uses: np.ndarray  # [L, E] int32, tokens routed
    num_tokens: int = 0
    hits: int = 0
    misses: int = 0
    fetched: int = 0
    wanted: int = 0  # fetched ones worth storing, stored or not
    evicted: int = 0


class ExpertRuntime:
    """``Experts`` of ftd.model.architecture on the CPU device. Owned by the engine thread.

    With 0 slots the router's choice is never looked at and the addresses never change.

    Args:
        fetch_of: for each number of misses of a layer, how many take the link (split.fetch_table);
            more misses than it has entries count as its last one. None: all of them.
        allowance: what background fills may take from each step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: ExpertLayout,
        host_pool: HostPool,
        ops: Ops,
        num_slots: int = 0,
        *,
        fetch_of: Sequence[int] | None = None,
        allowance: Allowance = CPU_ALLOWANCE,
        tuning: policy.Tuning | None = None,
    ) -> None:
        mlp = spec.layers[spec.moe_layers[0]].mlp
        assert isinstance(mlp, MoeSpec)
        self._layers, self._num_experts = spec.moe_layers, mlp.num_experts
        self._row = {layer: row for row, layer in enumerate(self._layers)}
        self._layout, self._pool, self._ops = layout, host_pool, ops
        self._activation = mlp.activation
        every = range(self._num_experts + 1)
        self._fetch_of: Sequence[Sequence[int]] = [every if fetch_of is None else fetch_of]
        self._allowance, self._tuning = allowance, tuning or policy.Tuning()
        self._host = np.stack([host_pool.addresses(layer).numpy() for layer in self._layers])
        self._address = self._host.copy()  # [L, E] int64: slot if resident, else host record
        self._rows = list(torch.from_numpy(self._address))  # the same memory, as kernels take it
        num_layers = len(self._layers)
        self._table = SlotTable(num_layers, self._num_experts, 0)
        self._memory: SlotMemory | None = None
        self._state = policy.new_state(num_layers, self._num_experts, mlp.experts_per_token)
        self._step = _Step(np.zeros(self._host.shape, np.int32))
        self._plan: policy.Plan
        self._counters = ExpertCounters()
        self._trace: TraceRecorder | None = None
        self._paused = False
        self.resize(num_slots)

    # ---- the step ----

    def forward(
        self,
        layer: int,  # among all layers
        x: torch.Tensor,  # [T, H] act
        ids: torch.Tensor,  # [T, K] int32, -1: not in use
        weights: torch.Tensor,  # [T, K] float32
        pause: Pause = NO_PAUSE,
    ) -> torch.Tensor:  # [T, H] float32
        pause()
        row = self._row[layer]
        if self._trace is not None:
            self._trace.add(row, ids.numpy())
        if self._table.num_slots:
            self._route(row, ids.numpy())
        return self._ops.moe(x, ids, weights, self._rows[row], self._layout, self._activation)

    def _route(self, row: int, ids: np.ndarray) -> None:
        """Count hits and misses of one layer, and store the misses that are worth a slot."""
        step = self._step
        counts = np.bincount(ids[ids >= 0], minlength=self._num_experts)
        used = np.flatnonzero((counts > 0) & (step.uses[row] == 0))  # once a step
        missed = used[self._table.residency[row, used] == EMPTY]
        step.uses[row] += counts
        step.num_tokens = max(step.num_tokens, len(ids))
        step.hits += len(used) - len(missed)
        step.misses += len(missed)
        if len(ids) > DECODE_TOKENS:
            step.fetched += len(missed)
            self._admit_hottest(row, missed)
        else:
            fetch_of = self._fetch_of[min(len(ids) - 1, len(self._fetch_of) - 1)]
            count = fetch_of[min(len(missed), len(fetch_of) - 1)]
            step.fetched += count
            for expert in policy.in_order(missed, self._plan.value[row, missed])[:count]:
                if self._plan.admit[row, expert]:
                    step.wanted += 1
                    if self._table.num_free:
                        self._store(row * self._num_experts + int(expert))

    def _admit_hottest(self, row: int, missed: np.ndarray) -> None:
        """Prefill: store the most used misses of a layer, at the cost of layers the pass has left.

        An expert gives its slot up in the middle of the pass only where the pass will not come
        again; that eviction stays even if the step fails, since its bytes are gone.
        """
        step, first = self._step, row * self._num_experts
        steps = policy.prefill_steps(self._tuning, step.num_tokens)
        rate = step.uses[row] / step.num_tokens
        values = self._plan.value
        values[row] = policy.value_after(self._state, self._tuning, row, rate, steps)
        hottest = policy.in_order(missed, values[row, missed])
        num_free = self._table.num_free
        waiting = hottest[num_free:]
        behind = np.flatnonzero(self._table.residency[:row] != EMPTY)
        victims = policy.in_order(behind, -values.ravel()[behind])[: len(waiting)]
        swaps = policy.num_swaps(values[row, waiting], values.ravel()[victims], self._tuning)
        for victim in victims[:swaps].tolist():
            self._evict(victim)
        step.evicted += swaps
        for expert in hottest[: num_free + swaps].tolist():
            self._store(first + expert)

    def _store(self, key: int) -> None:
        """Copy the whole record, scales and padding too, into a free slot."""
        assert self._memory is not None
        row, expert = divmod(key, self._num_experts)
        slot = self._table.take(key)
        self._memory.record(slot)[:] = self._pool.record(self._layers[row], expert)

    def _commit_fills(self) -> int:
        fills = self._table.filling
        for key in fills:
            self._commit(key)
        return len(fills)

    def _commit(self, key: int) -> None:
        assert self._memory is not None
        self._address.reshape(-1)[key] = self._memory.address(self._table.commit(key))

    def _evict(self, key: int) -> None:
        self._table.evict(key)
        self._address.reshape(-1)[key] = self._host.reshape(-1)[key]

    # ---- between steps ----

    @contextmanager
    def within_pass(self) -> Iterator[None]:
        """Inside, other steps begin and end while the pass that is under way pauses.

        What it has stored is resident from here on, and stays even if the pass fails: it is whole.
        """
        self._count(_Step(self._step.uses), self._commit_fills(), 0)
        outer, self._step = self._step, _Step(np.zeros_like(self._step.uses))
        trace, self._trace = self._trace, None  # it takes steps as a whole, one at a time
        self._paused = True
        try:
            yield
        finally:
            self._step, self._trace, self._paused = outer, trace, False

    parts = 1  # experts are not divided

    def split(
        self,
        fetch_of: Sequence[Sequence[float]],
        beside: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """For 1, 2, 4 and 8 rows: for each number of misses of a layer, how many take the link.

        More misses than a table knows count as its last.

        Args:
            beside: the same in the pauses of a pass, in which no copies take the link here.
        """
        one, two, four, eight = ([int(count) for count in table] for table in fetch_of)
        self._fetch_of = [one, two, four, four, eight]  # of 1, 2, 3, ... rows

    def share_prompts(self, rates: PromptRates | None) -> None:
        """The CPU computes all of a prompt here."""

    def safe_point(self) -> None:
        """The step is done and good: its fills become resident, and the next step is prepared."""
        if self._trace is not None:
            self._trace.commit_step()
        step = self._step
        if not step.num_tokens:
            return  # nothing ran since the last safe point, or there are no slots
        fills = self._commit_fills()
        used = step.uses > 0
        if step.num_tokens > DECODE_TOKENS:
            steps = policy.prefill_steps(self._tuning, step.num_tokens)
            policy.observe(self._state, self._tuning, step.uses / step.num_tokens, steps)
        else:
            policy.observe(self._state, self._tuning, used)
        if self._paused:
            self._count(step, fills, step.evicted)
        else:
            plan = self._prepare(used, step.wanted, self._allowance)
            self._count(step, fills + len(plan.fill), step.evicted + len(plan.evict))
        self._begin_step()

    def abandon_step(self) -> None:
        """The step failed: none of its fills, counts or observations remain."""
        if self._trace is not None:
            self._trace.drop_step()
        self._table.abandon_fills()
        if self._step.num_tokens:
            self._plan = replace(self._plan, value=policy.value(self._state, self._tuning))
            self._count(_Step(self._step.uses), 0, self._step.evicted)
            self._begin_step()

    def resize(self, num_slots: int, num_staging: int | None = None) -> Resized:
        """Change the number of slots, at a safe point. No record is read from the host pool again.

        Growing keeps what is resident; shrinking keeps the most valuable that fit.

        Args:
            num_staging: nothing has to be brought anywhere first on the CPU device.
        Raises:
            BudgetExceeded: the system does not grant the address space.
        """
        assert not self._step.num_tokens, "a step is running"
        was = self._table.num_slots
        if num_slots and self._memory is None:
            self._memory = SlotMemory(self._host.size, self._layout.record_bytes)
        resized = self._table.resize(num_slots, policy.value(self._state, self._tuning))
        for key in resized.evicted:
            self._address.reshape(-1)[key] = self._host.reshape(-1)[key]
        for key, source, target in resized.moves:
            assert self._memory is not None
            self._memory.record(target)[:] = self._memory.record(source)
            self._address.reshape(-1)[key] = self._memory.address(target)
        if self._memory is not None:
            self._memory.release(num_slots, was)
        plan = self._prepare(np.zeros(self._host.shape, bool), 0, Allowance(0.0, 0.0))
        self._count(self._step, len(plan.fill), len(resized.evicted) + len(plan.evict))
        return resized

    def _prepare(self, used: np.ndarray, wanted: int, allowance: Allowance) -> policy.Plan:
        """Decide for the next step, and carry it out: copies here are done when they return."""
        table = self._table
        self._plan = plan = policy.plan(
            self._state, self._tuning, table.residency != EMPTY, used, table.num_free, wanted,
            allowance,
        )  # fmt: skip
        for key in plan.evict.tolist():
            self._evict(key)
        for key in plan.fill.tolist():
            self._store(key)
            self._commit(key)
        return plan

    def _begin_step(self) -> None:
        self._step.uses.fill(0)
        self._step = _Step(self._step.uses)

    # ---- what others see ----

    def _count(self, step: _Step, fills: int, evicted: int) -> None:
        was = self._counters
        self._counters = ExpertCounters(
            hits=was.hits + step.hits,
            misses=was.misses + step.misses,
            fetched=was.fetched + step.fetched,
            on_cpu=was.on_cpu + step.misses - step.fetched,
            evicted=was.evicted + evicted,
            fills=was.fills + fills,
            fill_bytes=was.fill_bytes + fills * self._layout.record_bytes,
            slots_total=self._table.num_slots,
            slots_used=self._table.num_used,
        )

    def counters(self) -> ExpertCounters:
        """As of the last safe point; from any thread."""
        return self._counters

    def residency_map(self) -> ResidencyMap:
        """A copy, at a safe point."""
        value = policy.value(self._state, self._tuning)
        return ResidencyMap(self._layers, self._table.residency.copy(), value)

    @property
    def recording(self) -> bool:
        return self._trace is not None

    def record_trace(self, recorder: TraceRecorder | None) -> None:
        """Record the routing of the steps from here on, at a safe point. None: stop."""
        self._trace = recorder

    def close(self) -> None:
        """Give the slots' memory back; ``forward`` must not be called any more. Idempotent."""
        if self._memory is not None:
            self._memory.close()
