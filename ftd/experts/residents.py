"""Which experts are in slots, what they are worth, and what has been counted: on any device.

An address table [L, E] says where a step finds each expert: in its slot, or in its host record.
What moves bytes, ``ExpertRuntime`` on the CPU device and ``Residency`` on a GPU, stands on this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from ftd.experts import policy
from ftd.experts.host_pool import HostPool
from ftd.experts.slots import EMPTY, Resized, SlotTable
from ftd.experts.trace import TraceRecorder
from ftd.kernels.formats import ExpertLayout
from ftd.model.spec import ModelSpec, MoeSpec

DECODE_TOKENS = 8  # the largest decode batch: a step with more rows is a prefill


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


class Residents(ABC):
    """Keys are flat, as in ``SlotTable``. Owned by the engine thread."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ExpertLayout,
        host_pool: HostPool,
        num_slots: int,
        tuning: policy.Tuning | None,
    ) -> None:
        mlp = spec.layers[spec.moe_layers[0]].mlp
        assert isinstance(mlp, MoeSpec)
        self.layers, self.num_experts = spec.moe_layers, mlp.num_experts
        self.experts_per_token = mlp.experts_per_token
        self._activation = mlp.activation
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self._layout, self._pool = layout, host_pool
        self._host = np.stack([host_pool.addresses(layer).numpy() for layer in self.layers])
        self._address = self._host.copy()  # [L, E] int64, what steps from now on will see
        self._table = SlotTable(len(self.layers), self.num_experts, num_slots)
        self._tuning = tuning or policy.Tuning()
        self._state = policy.new_state(len(self.layers), self.num_experts, mlp.experts_per_token)
        self._plan: policy.Plan  # for the next step
        self._counters = ExpertCounters(slots_total=num_slots)
        self._trace: TraceRecorder | None = None

    @abstractmethod
    def _slot_address(self, slot: int) -> int: ...

    @abstractmethod
    def _move(self, source: int, target: int) -> None:
        """Copy the record in one slot to another."""

    # ---- who is where

    def _settle(self, key: int, slot: int) -> None:
        """``slot`` holds the expert: steps from now on find it there."""
        self._address.reshape(-1)[key] = self._slot_address(slot)

    def _evict(self, key: int) -> None:
        self._table.evict(key)
        self._address.reshape(-1)[key] = self._host.reshape(-1)[key]

    def _resize_table(self, num_slots: int) -> Resized:
        """Keep the most valuable that fit, and move those whose slot goes away."""
        resized = self._table.resize(num_slots, policy.value(self._state, self._tuning))
        for key in resized.evicted:
            self._address.reshape(-1)[key] = self._host.reshape(-1)[key]
        for key, source, target in resized.moves:
            self._move(source, target)
            self._settle(key, target)
        return resized

    def _coming(self, row: int) -> set[int]:
        """Experts of a layer that are on their way into slots."""
        return {k % self.num_experts for k in self._table.filling if k // self.num_experts == row}

    # ---- what they are worth

    def _observe(self, uses: np.ndarray, num_tokens: int) -> None:
        """A step was good: take note of what it used.

        Args:
            uses: [L, E] int32, tokens routed.
        """
        if num_tokens > DECODE_TOKENS:
            steps = policy.prefill_steps(self._tuning, num_tokens)
            policy.observe(self._state, self._tuning, uses / num_tokens, steps)
        else:
            some_absent = self._table.num_used < uses.size
            policy.observe(self._state, self._tuning, uses > 0, judge=some_absent)

    def _admit(
        self,
        row: int,
        uses: np.ndarray,  # [E] int32, tokens routed
        num_tokens: int,
        missed: np.ndarray,
    ) -> list[int]:
        """The most valuable misses of a prompt's layer, at the cost of layers the pass has left.

        An expert gives its slot up in the middle of the pass only where the pass will not come
        again; that eviction stays even if the step fails, since its bytes are gone.

        Returns:
            Experts for which slots are free.
        """
        steps = policy.prefill_steps(self._tuning, num_tokens)
        values = self._plan.value
        values[row] = policy.value_after(self._state, self._tuning, row, uses / num_tokens, steps)
        missed = np.setdiff1d(missed, list(self._coming(row)))
        hottest = policy.in_order(missed, values[row, missed])
        num_free = self._table.num_free
        behind = np.flatnonzero(self._table.residency[:row] != EMPTY)
        waiting = hottest[num_free:]
        victims = policy.in_order(behind, -values.ravel()[behind])[: len(waiting)]
        swaps = policy.num_swaps(values[row, waiting], values.ravel()[victims], self._tuning)
        for victim in victims[:swaps].tolist():
            self._evict(victim)
        return hottest[: num_free + swaps].tolist()

    # ---- what others see

    def _count(self, step: ExpertCounters) -> None:
        """Add what a step has done; gauges and bytes are found here."""
        was = self._counters
        self._counters = ExpertCounters(
            hits=was.hits + step.hits,
            misses=was.misses + step.misses,
            fetched=was.fetched + step.fetched,
            on_cpu=was.on_cpu + step.on_cpu,
            evicted=was.evicted + step.evicted,
            ahead=was.ahead + step.ahead,
            ahead_unused=was.ahead_unused + step.ahead_unused,
            fills=was.fills + step.fills,
            fill_bytes=was.fill_bytes + step.fills * self._layout.record_bytes,
            slots_total=self._table.num_slots,
            slots_used=self._table.num_used,
        )

    def counters(self) -> ExpertCounters:
        """As of the last safe point; from any thread."""
        return self._counters

    def residency_map(self) -> ResidencyMap:
        """A copy, at a safe point."""
        value = policy.value(self._state, self._tuning)
        return ResidencyMap(self.layers, self._table.residency.copy(), value)

    @property
    def recording(self) -> bool:
        return self._trace is not None

    def record_trace(self, recorder: TraceRecorder | None) -> None:
        """Record the routing of the steps from here on, at a safe point. None: stop."""
        self._trace = recorder
