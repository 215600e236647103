"""Where every expert is while the GPU computes: a slot in its memory, or the registered host pool.

Kernels take an address table [L, E]. An entry is the expert's slot, or its record in host memory,
which the same kernel reads over the link; so a miss needs no slot and no wait, and residency is
nothing but the table. The host is its only writer: it learns afterwards what steps used, decides at
the safe point, and replaces the table in stream order.

    decode    captured; reads the table, divides misses between link and CPU, stores some of what it
              reads in slots lent to it, and leaves its routing in a log that the host reads later
    prefill   eager, layer by layer: ``ftd.cuda.experts``

A slot is written by the copy stream only after every step launched before has ended, and named in
the table only after the copy has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from ftd.errors import BudgetExceeded
from ftd.experts import policy
from ftd.experts.costs import Allowance
from ftd.experts.host_pool import HostPool
from ftd.experts.residents import ExpertCounters, Residents
from ftd.experts.slots import EMPTY, Resized
from ftd.experts.split import PromptRates
from ftd.kernels.divide import KEYS, ON_CPU, WANTED
from ftd.kernels.formats import ExpertLayout
from ftd.kernels.ops import Ops
from ftd.model.spec import ModelSpec

from .cpu_experts import CpuExperts
from .division import MOST_LENT, Division
from .memory import DeviceMemory
from .prompt_share import PromptShare
from .staging import Places
from .tables import Marker, Upload, on_stream, past_copies

# A miss of a decode step is read over the link; bringing it into a slot costs one more read of it.
LINK_ALLOWANCE = Allowance(fills=2.0, cost_misses=1.0)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a captured step on its way was given."""

    resident: np.ndarray  # [L, E] bool, as its table says
    lent: tuple[int, ...]  # slots that it may fill
    divided: bool


@dataclass(frozen=True, slots=True)
class Fill:
    key: int
    landed: Marker


class Residency(Residents):
    """Slots, the tables that name them, and what changes between steps. Owned by the engine thread.

    Args:
        num_staging: records of the staging area for prefill.
        cpu: computes missed experts beside captured steps. None: the link brings all of them.
        pinned: the pool is registered. If not, kernels cannot read it: missed experts always go
            through the staging area, in several passes where it is too small.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: ExpertLayout,
        host_pool: HostPool,
        ops: Ops,
        memory: DeviceMemory,
        *,
        num_slots: int,
        num_staging: int,
        cpu: CpuExperts | None = None,
        pinned: bool = True,
        allowance: Allowance = LINK_ALLOWANCE,
        tuning: policy.Tuning | None = None,
    ) -> None:
        super().__init__(spec, layout, host_pool, num_slots, tuning)
        self.pinned = pinned
        self._ops, self._allowance = ops, allowance
        self._moe_experts = self._host.size
        device = memory.device
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._table_of_step = Upload(torch.from_numpy(self._address).to(device, copy=True))
        self._table_of_pass = Upload(torch.from_numpy(self._host[0]).to(device, copy=True))
        record = layout.record_bytes
        self._slots = memory.reserve(self._moe_experts * record, num_slots * record)
        most = max(num_staging, self.num_experts)
        self._staging = memory.reserve(most * record, num_staging * record)
        self._elastic = memory.elastic
        self._num_staging = num_staging
        self._places = Places(num_staging)
        self._records = self._host_records()
        self._slot_bytes, self._staging_bytes = self._slots.bytes(), self._staging.bytes()
        begin = self._slots.address
        self.division = Division(
            ops, layout, self._activation, self.table_rows(),
            (begin, begin + self._moe_experts * record), cpu,
        )  # fmt: skip
        self._launch_s = 0.0  # of the host, between the experts of two layers of a pass
        self._left_s = 0.0
        self.share: PromptShare | None = None
        if cpu is not None:
            self.share = PromptShare(
                cpu.ops, torch.from_numpy(self._host), layout, self._activation,
                cpu.mailbox.x.dtype, device,
            )  # fmt: skip
        self._plan = self._decide(np.zeros(self._host.shape, bool), 0)
        self._parts_on_cpu = 0  # that make no whole expert yet
        self._wanted = 0  # fetched misses of the running step worth storing, stored or not
        self._fills: list[Fill] = []
        self._dirty = False  # the table on the device lags behind
        self._paused = False  # a pass, for other steps
        self._uses = np.zeros(self._host.shape, np.int32)
        self._first_keys = np.arange(len(self.layers))[:, None, None] * self.num_experts
        self._num_tokens = 0
        self._step = ExpertCounters()  # of the running step

    @property
    def layout(self) -> ExpertLayout:
        return self._layout

    @property
    def all_resident(self) -> bool:
        return self._table.num_used == self._moe_experts

    def resident_addresses(self) -> np.ndarray:
        """[n] int64: of slots that hold an expert, as a step launched now will find them."""
        return self._address[self._address != self._host]

    @property
    def parts(self) -> int:
        """See ``Division.parts``."""
        return self.division.parts

    def split(
        self,
        fetch_of: Sequence[Sequence[float]],
        beside: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """See ``Division.split``."""
        self.division.split(fetch_of, beside)

    def share_prompts(self, rates: PromptRates | None) -> None:
        """What the CPU takes of a prompt's missed experts; None: nothing."""
        if self.share is not None:
            self.share.rates = rates

    def table_rows(self) -> torch.Tensor:
        """[L, E] int64 on the device, at a fixed address: what captured steps read."""
        return self._table_of_step.device_tensor

    def fill_slots(self) -> None:
        """Fill all slots at the start, evenly over the layers: any expert is better than none."""
        order = np.arange(self._moe_experts).reshape(len(self.layers), -1).T.ravel()
        for key in order[: self._table.num_slots].tolist():
            self._start_fill(key)
        for fill in self._fills:
            fill.landed.wait()
        self._land()
        self._publish()

    # ---- between steps ----

    @contextmanager
    def within_pass(self) -> Iterator[None]:
        """Inside, other steps begin and end while the pass that is under way pauses."""
        outer = self._step, self._uses, self._num_tokens, self._wanted, self._trace
        self._uses, self._trace = np.zeros_like(self._uses), None
        self._begin_step()
        self._paused = True
        try:
            with past_copies(), self.division.beside_pass():
                # the slots of those that the pass has evicted are being overwritten
                if self._dirty:
                    self._publish()
                yield
        finally:
            self._step, self._uses, self._num_tokens, self._wanted, self._trace = outer
            self._paused = False

    def launching(self, *, divided: bool) -> Launch:
        """Before a captured step is launched; ``routed`` takes it back."""
        lent: tuple[int, ...] = ()
        if divided:
            # half of what is free: another step may be launched before this one is read
            lent = self._table.lend(min(MOST_LENT, (self._table.num_free + 1) // 2))
            self.division.lend([self._slot_address(slot) for slot in lent])
            if self.division.cpu is not None:
                self.division.cpu.step_begins()
        return Launch(self._address != self._host, lent, divided)

    def routed(self, launch: Launch, log: np.ndarray, report: np.ndarray | None) -> None:
        """Take in what a captured step has used, and make resident what it stored.

        Args:
            log: [L, B, K] int32, -1 in rows not in use.
            report: ``kernels.divide.Shared.report`` of a divided step.
        Raises:
            EngineFailed: the CPU left its part undone; the step is worth nothing.
        """
        stored = on_cpu = 0
        if report is not None:
            if self.division.cpu is not None:
                self.division.cpu.step_ended()
            for slot, key in zip(launch.lent, report[KEYS:].tolist()):
                if self._table.settle(slot, key):
                    self._settle(key, slot)
                    stored += 1
            self._wanted += int(report[WANTED])
            parts = self._parts_on_cpu + int(report[ON_CPU])
            on_cpu, self._parts_on_cpu = divmod(parts, self.division.parts)
            self._dirty |= stored > 0
        in_use = log[:, :, 0] >= 0
        if self._trace is not None:
            for row, ids in enumerate(log):
                self._trace.add(row, ids[in_use[row]])
        keys = (log + self._first_keys)[in_use].ravel()
        self._uses += np.bincount(keys, minlength=self._uses.size).reshape(self._uses.shape)
        self._num_tokens = max(self._num_tokens, int(in_use.sum(1).max()))
        used = self._uses > 0
        misses = int(np.count_nonzero(used & ~launch.resident))
        step = self._step
        self._step = replace(
            step,
            hits=int(np.count_nonzero(used)) - misses,
            misses=misses,
            fetched=misses - step.on_cpu - on_cpu,
            on_cpu=step.on_cpu + on_cpu,
            fills=step.fills + stored,
        )

    def safe_point(self) -> None:
        """The last step was good: take note of what it used, and change residency for the next."""
        if not self._paused:
            self._places.clear()
        if self._trace is not None:
            self._trace.commit_step()
        if not self._num_tokens:
            return
        self._observe(self._uses, self._num_tokens)
        landed = self._land()
        if not self.all_resident and not self._paused:
            self._plan = self._decide(self._uses > 0, self._wanted)
            self._carry_out(self._plan)
            self.division.judge(self._plan.value, self._plan.admit)
        elif self._dirty:
            self._publish()
        self._count(self._with_landed(landed))
        self._begin_step()

    def abandon_step(self) -> None:
        """The step failed: nothing it used counts. What it copied is whole, and stays."""
        if not self._paused:
            self._places.clear()
        if self._trace is not None:
            self._trace.drop_step()
        if self._dirty:
            self._publish()
        self._begin_step()

    def resize(self, num_slots: int, num_staging: int | None = None) -> Resized:
        """Change the number of slots, with no step in flight. Nothing is read from the host pool.

        Args:
            num_staging: records of the staging area from now on; None: as it is.
        Raises:
            BudgetExceeded: the GPU has no more memory, or kernels cannot read what would have no
                slot; nothing has changed then.
        """
        assert not self._num_tokens, "a step is running"
        staging = self._num_staging
        if num_staging is not None and self._elastic:
            staging = num_staging
        if not self.pinned and staging == 0 and num_slots < self._moe_experts:
            raise BudgetExceeded(
                f"{num_slots} of {self._moe_experts} experts would have slots, and kernels cannot "
                "read the others: the host pool is not registered",
                hint="raise the limit on locked memory (ulimit -l) and start ftd again",
            )
        size, were = self._layout.record_bytes, self._table.num_slots
        if self._copies is not None:
            torch.cuda.synchronize(self._device)  # fills write slots, and steps read them
        landed = self._land()
        if staging < self._num_staging:
            self._resize_staging(staging)
        if num_slots > were:
            self._slots.resize(num_slots * size)  # may be refused
            self._slot_bytes = self._slots.bytes()
        resized = self._resize_table(num_slots)
        self._publish()
        if num_slots < were:
            if self._copies is not None:
                torch.cuda.synchronize(self._device)  # moved, and the table names no old place
            self._slots.resize(num_slots * size)
            self._slot_bytes = self._slots.bytes()
        if staging > self._num_staging:
            self._resize_staging(staging)
        self._step = replace(self._step, evicted=len(resized.evicted))
        self._plan = self._decide(np.zeros(self._host.shape, bool), 0)
        if not self.all_resident:
            self._carry_out(self._plan)
        self._count(self._with_landed(landed))
        self._begin_step()
        return resized

    def _resize_staging(self, num_records: int) -> None:
        self._staging.resize(num_records * self._layout.record_bytes)
        self._staging_bytes = self._staging.bytes()
        self._num_staging = num_records
        self._places = Places(num_records)

    def _staging_address(self, place: int) -> int:
        return self._staging.address + place * self._layout.record_bytes

    def _staged_record(self, place: int) -> torch.Tensor:
        size = self._layout.record_bytes
        return self._staging_bytes[place * size : (place + 1) * size]

    def _stage(self, row: int, places: Mapping[int, int]) -> Marker:
        """Queue the copies of experts into their places."""
        with on_stream(self._copies):
            for expert, place in places.items():
                self._staged_record(place).copy_(self._records[row][expert], non_blocking=True)
            landed = Marker(self._device)
            landed.mark()
        return landed

    def _slot_address(self, slot: int) -> int:
        return self._slots.address + slot * self._layout.record_bytes

    def _record(self, slot: int) -> torch.Tensor:
        size = self._layout.record_bytes
        return self._slot_bytes[slot * size : (slot + 1) * size]

    def _move(self, source: int, target: int) -> None:
        self._record(target).copy_(self._record(source))

    def _decide(self, used: np.ndarray, wanted: int) -> policy.Plan:
        table = self._table
        return policy.plan(
            self._state, self._tuning, table.residency != EMPTY, used,
            table.num_free + table.num_lent, wanted, self._allowance,
        )  # fmt: skip

    def _carry_out(self, plan: policy.Plan) -> None:
        filling = set(self._table.filling)
        fills = [key for key in plan.fill.tolist() if key not in filling]
        for key in plan.evict.tolist():
            self._evict(key)
        fills = fills[: self._table.num_free]
        if self._dirty:
            self._publish()
        if fills:
            begun = Marker(self._device)
            begun.mark()  # behind every step launched so far, and behind the table without victims
            begun.hold(self._copies)
            for key in fills:
                self._start_fill(key)

    def _start_fill(self, key: int, place: int | None = None) -> int:
        """Queue the copy of a record into a free slot; returns the slot's offset in bytes.

        Args:
            place: of the staging area, where the record is or is about to be.
        """
        row, expert = divmod(key, self.num_experts)
        start = self._table.take(key) * self._layout.record_bytes
        with on_stream(self._copies):
            target = self._slot_bytes[start : start + self._layout.record_bytes]
            record = self._records[row][expert] if place is None else self._staged_record(place)
            target.copy_(record, non_blocking=True)
            landed = Marker(self._device)
            landed.mark()
        self._fills.append(Fill(key, landed))
        return start

    def _land(self) -> int:
        """Make resident what has arrived, in the order in which it was asked for."""
        landed = 0
        for fill in self._fills:
            if not fill.landed.passed():
                break
            self._settle(fill.key, self._table.commit(fill.key))
            self._dirty = True
            landed += 1
        del self._fills[:landed]
        return landed

    def _evict(self, key: int) -> None:
        super()._evict(key)
        self._step = replace(self._step, evicted=self._step.evicted + 1)
        self._dirty = True

    def _publish(self) -> None:
        self._table_of_step.send(torch.from_numpy(self._address))
        self._dirty = False

    def _begin_step(self) -> None:
        self._uses.fill(0)
        self._num_tokens = self._wanted = 0
        self._step = ExpertCounters()

    def _with_landed(self, landed: int) -> ExpertCounters:
        """What the step has done, and the fills that have arrived meanwhile."""
        return replace(self._step, fills=self._step.fills + landed)

    def _host_records(self) -> list[list[torch.Tensor]]:
        return [
            [torch.from_numpy(self._pool.record(layer, e)) for e in range(self.num_experts)]
            for layer in self.layers
        ]

    def close(self) -> None:
        """Give the slots' memory back; nothing may run any more. Idempotent."""
        if self._copies is not None:
            torch.cuda.synchronize(self._device)
        self._records.clear()
        self._slot_bytes = self._staging_bytes = torch.empty(0, dtype=torch.uint8)
        self._slots.close()
        self._staging.close()
