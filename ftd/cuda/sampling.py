"""Tokens from logits on the device, whatever a request asks for: penalties, masks, logprobs.

A step of decode is two graphs, forward and sample, so that a mask which depends on the token before
may come while forward runs. A sample graph allocates nothing, and each batch size has a few: rows
with nothing but a temperature need three launches, those with top_k and top_p six times as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ftd.kernels.sample import (
    ALL_SHAPES,
    Drawn,
    Kept,
    RowNumbers,
    Rows,
    Shapes,
    mask_words,
    sample_ref,
)

from .precompile import mark_of
from .tables import Upload

MOST_ROWS = 8  # of one launch


class Source(Protocol):
    """A sequence whose logits are changed by what it has drawn, or by biases."""

    @property
    def drawn(self) -> int:
        """Tokens so far."""
        ...

    @property
    def penalised(self) -> bool: ...

    @property
    def biased(self) -> bool: ...

    def write_counts(self, out: torch.Tensor) -> None:
        """[V] int32, as ``Kept.counts``."""
        ...

    def write_bias(self, out: torch.Tensor) -> None:
        """[V] float32."""
        ...


class SamplerMemory:
    """What the device knows of sequences, in a slot for each row of a launch, and room to compute.

    Kernels count the tokens they draw, so a slot stays right while steps are launched ahead. It is
    written anew when another sequence takes it, or when the host knows another number of tokens.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.kept = Kept(MOST_ROWS, vocab, device)
        self.work: Any = None
        if device.type == "cuda":
            from ftd.kernels.triton.sample import Work

            self.work = Work(MOST_ROWS, vocab, device)
        self._sources: list[Source | None] = [None] * MOST_ROWS
        self._drawn = [0] * MOST_ROWS  # as the device has counted
        self._order = list(range(MOST_ROWS))  # the one used longest ago first
        self._counts = Upload(torch.zeros(vocab, dtype=torch.int32, device=device))
        self._bias = Upload(torch.zeros(vocab, dtype=torch.float32, device=device))
        self._host_counts = torch.zeros(vocab, dtype=torch.int32)
        self._host_bias = torch.zeros(vocab, dtype=torch.float32)

    def slot_of(self, source: Source) -> int | None:
        return next((i for i, held in enumerate(self._sources) if held is source), None)

    def place(self, sources: Sequence[Source]) -> None:
        """Give each a slot that is up to date; nothing of theirs is in flight."""
        assert len(sources) <= MOST_ROWS, len(sources)
        for source in sources:
            slot = self.slot_of(source)
            if slot is None:
                taken = [self.slot_of(other) for other in sources]
                slot = next(i for i in self._order if i not in taken)
            elif self._drawn[slot] == source.drawn:
                continue
            self._sources[slot], self._drawn[slot] = source, source.drawn
            self._write(slot, source)

    def _write(self, slot: int, source: Source) -> None:
        if source.penalised:
            source.write_counts(self._host_counts)
            self._counts.send(self._host_counts)
            self.kept.counts[slot].copy_(self._counts.device_tensor)
        if source.biased:
            source.write_bias(self._host_bias)
            self._bias.send(self._host_bias)
            self.kept.bias[slot].copy_(self._bias.device_tensor)

    def launched(self, slots: Sequence[int]) -> None:
        """A token of each is on its way."""
        for slot in slots:
            self._drawn[slot] += 1
            self._order.remove(slot)
            self._order.append(slot)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row's draw."""

    numbers: RowNumbers
    uniform: float  # in (0, 1)
    mask: torch.Tensor | None = None  # [ceil(V / 32)] int32, perhaps longer; with flag MASKED


class RowSampler:
    """Draws for the rows of one batch size.

    Args:
        ids: [B] int64 on the device, where the tokens go for a step that follows.
    """

    def __init__(self, batch: int, memory: SamplerMemory, ids: torch.Tensor | None = None) -> None:
        device, words = memory.device, mask_words(memory.vocab)
        self._memory = memory
        self._ids = torch.zeros(batch, dtype=torch.int64, device=device) if ids is None else ids
        self.drawn = Drawn.empty(batch, device)
        self._host, self._rows = Rows(batch), Rows(batch, device)
        self._send = Upload(self._rows.block)
        self._host_mask = torch.zeros(batch, words, dtype=torch.int32)
        self._mask = self._host_mask.to(device, copy=True)
        self._send_mask = Upload(self._mask)
        self._graphs: dict[Shapes, torch.cuda.CUDAGraph] = {}

    def capture(self, logits: torch.Tensor, pool: Any, stream: torch.cuda.Stream) -> None:
        """Capture the draw from ``logits``, which every launch then has to come from.

        Nothing is allocated, so there is no need to empty caches before, as ``torch.cuda.graph``
        does: with nine captures for each batch size that would take a good part of a second.
        """
        with torch.cuda.stream(stream):
            for shapes in ALL_SHAPES:
                self.draw(logits, shapes)  # compiles
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool, capture_error_mode="thread_local")
                self.draw(logits, shapes)
                graph.capture_end()
                self._graphs[shapes] = graph

    def rehearse(self, logits: torch.Tensor) -> None:
        """What ``capture`` launches."""
        for shapes in ALL_SHAPES:
            self.draw(logits, shapes)

    def launch(self, logits: torch.Tensor, rows: Sequence[SampleRow | None]) -> None:
        """Queue the draws; None and what lies behind the last one: not in use."""
        shapes, masked = Shapes(), False
        for i in range(len(self._ids)):
            row = rows[i] if i < len(rows) else None
            self._host.set(i, row.numbers if row else RowNumbers(), row.uniform if row else 0.5)
            if row is not None:
                shapes |= row.numbers.shapes
            if row is not None and row.mask is not None:
                self._host_mask[i] = row.mask[: self._host_mask.shape[1]]
                masked = True
        self._send.send(self._host.block)
        if masked:
            self._send_mask.send(self._host_mask)
        if shapes in self._graphs:
            self._graphs[shapes].replay()
        else:
            self.draw(logits, shapes)
        self._memory.launched([r.numbers.slot for r in rows if r and r.numbers.slot >= 0])

    @torch.no_grad()
    def draw(self, logits: torch.Tensor, shapes: Shapes) -> None:
        """Launch the kernels for rows as they were sent last."""
        memory = self._memory
        if memory.work is None:
            sample_ref(logits, self._rows, memory.kept, self._mask, self.drawn)
            self._ids.copy_(self.drawn.tokens[: len(self._ids)].clamp(min=0))
            return
        from ftd.kernels.triton.sample import sample

        sample(
            logits, self._rows, memory.kept, self._mask, self.drawn, self._ids, memory.work,
            shapes,
        )  # fmt: skip


def load_kernels(vocab: int, device: torch.device) -> None:
    """Take what draws need from the cache on disk, before anybody waits for it.

    What is not there yet is left to the rehearsal of a warm-up.
    """
    from ftd.kernels.triton.keys import settle_keys

    settle_keys()
    if not mark_of_draws(vocab, device).exists():
        return
    memory = SamplerMemory(vocab, device)
    sampler = RowSampler(MOST_ROWS, memory)
    logits = torch.zeros(MOST_ROWS, vocab, device=device)
    for shapes in ALL_SHAPES:
        sampler.draw(logits, shapes)


def mark_of_draws(vocab: int, device: torch.device) -> Path:
    return mark_of("draws", vocab, torch.cuda.get_device_capability(device))
