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
from ftd.experts.costs import Allowance
from ftd.experts.host_pool import HostPool
from ftd.experts.pause import NO_PAUSE, Pause
from ftd.experts.residents import DECODE_TOKENS, ExpertCounters, Residents
from ftd.experts.slots import EMPTY, Resized, SlotMemory
from ftd.experts.split import PromptRates
from ftd.kernels.formats import ExpertLayout
from ftd.kernels.ops import Ops
from ftd.model.spec import ModelSpec

# A background fill is a copy of one record, about what computing a miss reads.
CPU_ALLOWANCE = Allowance(fills=1.0, cost_misses=1.0)


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

    def counters(self, fills: int) -> ExpertCounters:
        return ExpertCounters(
            hits=self.hits,
            misses=self.misses,
            fetched=self.fetched,
            on_cpu=self.misses - self.fetched,
            evicted=self.evicted,
            fills=fills,
        )


class ExpertRuntime(Residents):
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
        super().__init__(spec, layout, host_pool, 0, tuning)
        self._ops = ops
        every = range(self.num_experts + 1)
        self._fetch_of: Sequence[Sequence[int]] = [every if fetch_of is None else fetch_of]
        self._allowance = allowance
        self._rows = list(torch.from_numpy(self._address))  # the same memory, as kernels take it
        self._memory: SlotMemory | None = None
        self._step = _Step(np.zeros(self._host.shape, np.int32))
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
        counts = np.bincount(ids[ids >= 0], minlength=self.num_experts)
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
                        self._store(row * self.num_experts + int(expert))

    def _admit_hottest(self, row: int, missed: np.ndarray) -> None:
        """Prefill: store the most used misses of a layer."""
        step = self._step
        for expert in self._admit(row, step.uses[row], step.num_tokens, missed):
            self._store(row * self.num_experts + expert)

    def _store(self, key: int) -> None:
        """Copy the whole record, scales and padding too, into a free slot."""
        assert self._memory is not None
        row, expert = divmod(key, self.num_experts)
        slot = self._table.take(key)
        self._memory.record(slot)[:] = self._pool.record(self.layers[row], expert)

    def _commit_fills(self) -> int:
        fills = self._table.filling
        for key in fills:
            self._commit(key)
        return len(fills)

    def _commit(self, key: int) -> None:
        self._settle(key, self._table.commit(key))

    def _slot_address(self, slot: int) -> int:
        assert self._memory is not None
        return self._memory.address(slot)

    def _move(self, source: int, target: int) -> None:
        assert self._memory is not None
        self._memory.record(target)[:] = self._memory.record(source)

    def _evict(self, key: int) -> None:
        super()._evict(key)
        self._step.evicted += 1

    # ---- between steps ----

    @contextmanager
    def within_pass(self) -> Iterator[None]:
        """Inside, other steps begin and end while the pass that is under way pauses.

        What it has stored is resident from here on, and stays even if the pass fails: it is whole.
        """
        self._count(ExpertCounters(fills=self._commit_fills()))
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
        self._observe(step.uses, step.num_tokens)
        if not self._paused:
            fills += self._prepare(step.uses > 0, step.wanted, self._allowance)
        self._count(step.counters(fills))
        self._begin_step()

    def abandon_step(self) -> None:
        """The step failed: none of its fills, counts or observations remain."""
        if self._trace is not None:
            self._trace.drop_step()
        self._table.abandon_fills()
        if self._step.num_tokens:
            self._plan = replace(self._plan, value=policy.value(self._state, self._tuning))
            self._count(ExpertCounters(evicted=self._step.evicted))
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
        resized = self._resize_table(num_slots)
        if self._memory is not None:
            self._memory.release(num_slots, was)
        self._step.evicted = len(resized.evicted)
        fills = self._prepare(np.zeros(self._host.shape, bool), 0, Allowance(0.0, 0.0))
        self._count(self._step.counters(fills))
        self._begin_step()
        return resized

    def _prepare(self, used: np.ndarray, wanted: int, allowance: Allowance) -> int:
        """Decide for the next step, and carry it out: copies here are done when they return.

        Returns:
            Number of fills.
        """
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
        return len(plan.fill)

    def _begin_step(self) -> None:
        self._step.uses.fill(0)
        self._step = _Step(self._step.uses)

    def close(self) -> None:
        """Give the slots' memory back; ``forward`` must not be called any more. Idempotent."""
        if self._memory is not None:
            self._memory.close()
