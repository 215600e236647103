"""What memory is divided into: sizes to allocate, what they cost, and the table people read.

``ftd.memory.planner`` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftd.kv.windowing import Windowing
from ftd.memory import vram
from ftd.units import format_bytes, format_count


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes to allocate, and the bytes they cost."""

    context_tokens: int
    page_tokens: int
    num_pages: int
    num_slots: int
    num_experts: int  # of all layers
    prefill_chunk: int
    dense_bytes: int
    pool_bytes: int
    workspace_bytes: int
    headroom_bytes: int
    kv_bytes: int
    slots_bytes: int
    available_bytes: int
    limited_by: str
    host_kv_bytes: int = 0  # for KV that is evicted from a GPU
    num_states: int = 0  # recurrent ones, of a model that has them, or copies of windows
    states_bytes: int = 0
    windowing: Windowing | None = None  # of layers that keep no more than a window
    num_window_pages: int = 0
    window_bytes: int = 0
    vram: vram.VramPlan | None = None  # None: the CPU device

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.page_tokens

    @property
    def total_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes, _ in self._rows())

    def _rows(self) -> list[tuple[str, int, str]]:
        if self.vram:
            return [
                ("host pool", self.pool_bytes, f"{format_count(self.num_experts)} experts"),
                *self._host_kv_rows(),
                *self._kept_rows(self.vram.num_states, self.vram.states_bytes),
                ("headroom", self.headroom_bytes, "interpreter, libraries, requests"),
            ]
        slots = f"{format_count(self.num_slots)} of {format_count(self.num_experts)} experts"
        return [
            ("dense weights", self.dense_bytes, "attention, norms, routers, embedding, head"),
            ("host pool", self.pool_bytes, f"{format_count(self.num_experts)} experts"),
            ("workspace", self.workspace_bytes, f"chunks of {self.prefill_chunk} tokens"),
            *self._state_rows(),
            *self.window_rows(),
            ("KV pool", self.kv_bytes, self._kv_note()),
            ("expert slots", self.slots_bytes, slots if self.num_slots else "off"),
            ("headroom", self.headroom_bytes, "interpreter, libraries, requests"),
        ]

    @property
    def most_vram_bytes(self) -> int:
        """The largest ``--vram`` that this machine has room for beside the weights."""
        if self.vram:
            return self.vram.gpu.free_bytes
        return self.available_bytes - self.total_bytes + self.kv_bytes + self.slots_bytes

    def resized(self, num_pages: int, num_slots: int) -> MemoryPlan:
        """The same plan with other sizes of what moves."""
        kv_bytes = self.page_bytes * num_pages
        slots_bytes = self.record_bytes * num_slots
        on_gpu = self.vram and replace(self.vram, kv_bytes=kv_bytes, slots_bytes=slots_bytes)
        return replace(
            self,
            num_pages=num_pages,
            num_slots=num_slots,
            kv_bytes=kv_bytes,
            slots_bytes=slots_bytes,
            vram=on_gpu,
        )

    @property
    def page_bytes(self) -> int:
        return self.kv_bytes // self.num_pages

    @property
    def record_bytes(self) -> int:
        return self.pool_bytes // self.num_experts

    def device_rows(self) -> list[tuple[str, int, str]]:
        """(use, bytes, note) in the memory that computes: the GPU's, or on the CPU device all."""
        if self.vram is None:
            return self._rows()
        slots_note = vram.notes(self.num_slots, self.num_experts)
        return self.vram.rows(self._kv_note(), slots_note, self.window_rows())

    def window_rows(self) -> list[tuple[str, int, str]]:
        if self.windowing is None:
            return []
        layers, tokens = len(self.windowing.layers), self.windowing.tokens + 1
        note = f"layers with a window of {format_count(tokens)} tokens: {layers}"
        return [("window KV", self.window_bytes, note)]

    def _host_kv_rows(self) -> list[tuple[str, int, str]]:
        if not self.host_kv_bytes:
            return []
        tokens = self.host_kv_bytes // self.page_bytes * self.page_tokens
        return [("host KV", self.host_kv_bytes, f"{format_count(tokens)} tokens evicted from it")]

    def _state_rows(self) -> list[tuple[str, int, str]]:
        if not self.num_states:
            return []
        each = format_bytes(self.states_bytes // self.num_states)
        use = "to resume from" if self.windowing else "of sequences, and to resume from"
        note = f"{format_count(self.num_states)} of {each}: {use}"
        return [("states", self.states_bytes, note)]

    def _kept_rows(self, live: int, live_bytes: int) -> list[tuple[str, int, str]]:
        """Of states that are not on the GPU."""
        kept = self.num_states - live
        note = f"{format_count(kept)} to resume from"
        return [("states", self.states_bytes - live_bytes, note)] if kept else []

    def _kv_note(self) -> str:
        return (
            f"{format_count(self.kv_tokens)} tokens in {format_count(self.num_pages)} pages, "
            f"context {format_count(self.context_tokens)}"
        )

    def table(self) -> str:
        """The plan as people read it, a row for each use; the GPU's first."""
        host = _table(
            self._rows(), "available", self.available_bytes, f"limited by {self.limited_by}"
        )
        if self.vram is None:
            return host
        gpu = _table(
            self.device_rows(),
            "budget",
            self.vram.budget_bytes,
            f"of {format_bytes(self.vram.gpu.total_bytes)}",
        )
        return f"{self.vram.gpu.name}\n{gpu}\n\nhost memory\n{host}"


def _table(rows: list[tuple[str, int, str]], limit: str, limit_bytes: int, note: str) -> str:
    ends = [("total", sum(num_bytes for _, num_bytes, _ in rows), ""), (limit, limit_bytes, note)]
    lines = [
        f"{name:<14}{num_bytes:>18,} B {format_bytes(num_bytes):>9}   {note}".rstrip()
        for name, num_bytes, note in rows + ends
    ]
    lines.insert(len(rows), "-" * 44)
    return "\n".join(lines)
