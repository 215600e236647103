"""A decode step as captured graphs for each batch size: forward to the logits, then the sampler's.

Everything a step reads lies in buffers of fixed addresses: token ids, positions, page tables, how
rows are sampled, the experts' address table. A graph therefore outlives every change of batch,
pages and residency. Rows that no sequence uses have position -1: they choose no expert (id -1),
write their keys to the scratch page and no recurrent state, and what they sample is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ftd.kernels.delta import StateRows
from ftd.kernels.places import places
from ftd.kv.window_cache import WindowPages
from ftd.model.step import StepInput

from .sampling import RowSampler, SamplerMemory, SampleRow
from .tables import VERSIONS, Download, Fetched, Upload

BATCHES = (1, 2, 4, 8)
RUNS_BEFORE_CAPTURE = (
    2  # runs before a capture: compiles kernels, and lets libraries take their workspace
)

Forward = Callable[[StepInput], torch.Tensor]  # → logits [B, V]


def batch_for(rows: int) -> int | None:
    """The smallest graph that holds so many rows; None: too many for any."""
    return next((batch for batch in BATCHES if batch >= rows), None)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence's part of a decode step."""

    token: int  # not looked at in a step that follows another
    position: int
    pages: Sequence[int]  # at least position // page_tokens + 1 of them
    source: int = -1  # slot of its recurrent state, -1: it begins
    target: int = -1  # slot for the state after it, if the model has some
    window: Sequence[int] = ()  # as ``pages``, of layers with pages of their own


class DecodeInput:
    """What a graph reads for its rows, as views of one block of bytes: one copy moves it.

    The token ids come last: a step that follows another has them on the device already, and only
    the part before them is copied.
    """

    def __init__(self, batch: int, device: torch.device | str = "cpu") -> None:
        self.block = torch.zeros(32 * batch, dtype=torch.uint8, device=device)
        self.without_ids = self.block[: 24 * batch]
        # [B] each; -1: not in use
        rows = self.block.view(torch.int64).view(4, batch)
        self.position, source, target, self.ids = rows
        self.states = StateRows(source, target)
        rows[:3] = -1

    def fill(self, rows: Sequence[DecodeRow | None]) -> None:
        """Row by row, on the CPU; None and what lies behind the last one: not in use."""
        host = self.block.numpy().view(np.int64).reshape(4, -1)  # element by element torch is slow
        for i in range(host.shape[1]):
            row = rows[i] if i < len(rows) else None
            if row is None:
                host[0, i] = host[2, i] = -1
            else:
                host[:, i] = row.position, row.source, row.target, row.token


def fill_pages(
    table: torch.Tensor, rows: Sequence[Sequence[int] | None], page_stride: int = 1
) -> bool:
    """Bring a page table [B, M] int32 up to date with the pages of rows; False: it was."""
    changed = False
    for known, row in zip(table.numpy(), rows):
        if row is None:
            continue
        pages = np.asarray(row, np.int32) * page_stride
        if not np.array_equal(known[: len(pages)], pages):
            known[: len(pages)] = pages
            changed = True
    return changed


class DecodeGraph:
    """One batch size. On the CPU device ``forward`` is called where a graph would be replayed.

    Args:
        in_flight: steps of which the results are not read yet, at most.
        windowed: some layers have pages of their own.
    """

    def __init__(
        self,
        batch: int,
        most_pages: int,
        page_tokens: int,
        page_stride: int,  # as the KV cache has it
        scratch_page: int,
        device: torch.device,
        forward: Forward,
        memory: SamplerMemory,
        left: Sequence[torch.Tensor] = (),  # what forward leaves for the host besides logits
        *,
        in_flight: int = 2,
        windowed: bool = False,
    ) -> None:
        self.batch = batch
        self._page_tokens, self._page_stride = page_tokens, page_stride
        self._scratch_page = scratch_page * page_stride
        self._forward = forward
        self._host = DecodeInput(batch)
        self._input = DecodeInput(batch, device)
        self._send = Upload(self._input.block)
        self._send_following = Upload(self._input.without_ids)
        self._host_table = torch.zeros(batch, most_pages, dtype=torch.int32)
        self._table = self._host_table.to(device)
        self._send_table = Upload(self._table)
        self._windows: torch.Tensor | None = None  # the same, of layers with pages of their own
        if windowed:
            self._host_windows = torch.zeros_like(self._host_table)
            self._windows = torch.zeros_like(self._table)
            self._send_windows = Upload(self._windows)
        self._sequence = torch.arange(batch, dtype=torch.int32, device=device)
        self._places = places
        if device.type == "cuda":
            from ftd.kernels.triton.places import places as on_gpu

            self._places = on_gpu
        self._graph: torch.cuda.CUDAGraph | None = None
        self._sampler = RowSampler(batch, memory, self.ids)
        self._results = Download([self._sampler.drawn.block, *left], max(VERSIONS, in_flight + 1))
        self._step()

    @property
    def ids(self) -> torch.Tensor:
        """[B] int64 on the device: the tokens that a step reads, and then those it has drawn."""
        return self._input.ids

    def capture(self, pool: Any | None, stream: torch.cuda.Stream) -> Any:
        """Capture on ``stream`` into the memory ``pool`` of the graphs before; returns the pool."""
        with torch.cuda.stream(stream):
            for _ in range(RUNS_BEFORE_CAPTURE):
                self._step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._step()
        self._graph = graph
        self._sampler.capture(self.logits, graph.pool(), stream)
        return graph.pool()

    def rehearse(self) -> None:
        """Every draw from its logits, for what they launch; the forward pass has been run."""
        self._sampler.rehearse(self.logits)

    def launch(self, rows: Sequence[DecodeRow | None], *, following: bool = False) -> None:
        """Queue the forward pass of a step.

        Args:
            following: the tokens are those that the launch before drew in the same rows; they have
                not left the device, and perhaps do not exist yet.
        """
        self._host.fill(rows)
        if following:
            self._send_following.send(self._host.without_ids)
        else:
            self._send.send(self._host.block)
        pages = [row.pages if row else None for row in rows]
        if fill_pages(self._host_table, pages, self._page_stride):
            self._send_table.send(self._host_table)
        if self._windows is not None:
            windows = [row.window if row else None for row in rows]
            if fill_pages(self._host_windows, windows):
                self._send_windows.send(self._host_windows)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def sample(self, rows: Sequence[SampleRow | None]) -> Fetched:
        """Queue the draws from its logits; fetches ``Drawn.block`` and what forward leaves."""
        self._sampler.launch(self.logits, rows)
        return self._results.fetch()

    @torch.no_grad()
    def _step(self) -> None:
        given = self._input.position, self._table, self._page_tokens, self._scratch_page
        active, position, place = self._places(*given)
        window_place = None
        if self._windows is not None:
            _, _, window_place = self._places(
                self._input.position, self._windows, self._page_tokens, WindowPages.scratch_page
            )
        step = StepInput(
            self._input.ids, position, self._sequence, place, self._table, None,
            self._input.states, active, window_place, self._windows,
        )  # fmt: skip
        self.logits = self._forward(step)  # [B, V] float32
