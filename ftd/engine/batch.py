"""Pack a step's rows: which tokens of which sequences, where their KV goes, whose logits count."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from ftd.engine.recurrence import StateMoves
from ftd.kernels.delta import StateSpan
from ftd.model.step import StepInput


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence that run in this step."""

    ids: Seq[int]  # the tokens, ``count`` of them
    begin: int  # position of the first
    pages: Seq[int]  # page table of the sequence, long enough for begin + count
    logits: int  # how many of the last rows need logits: 0, 1, or all of them for prompt logprobs
    states: StateMoves | None = None  # of a model with recurrent layers, or windows

    @property
    def window(self) -> Seq[int]:
        """The sequence's page table in layers with a window; empty: they have no pages apart."""
        return self.states.window if self.states else ()

    @property
    def count(self) -> int:
        return len(self.ids)


def pack(spans: Seq[Span], page_tokens: int, page_stride: int = 1) -> StepInput:
    """One packed batch of ``spans`` in order; their logit rows in the same order.

    Shapes: T = sum of counts, B = number of spans, M = longest page table.

    Args:
        page_stride: as the KV cache has it.
    """
    counts = np.array([s.count for s in spans])
    table = _page_table([s.pages for s in spans]) * np.int32(page_stride)  # [B, M]
    sequence = np.repeat(np.arange(len(spans), dtype=np.int32), counts)  # [T]
    ends = np.cumsum(counts)
    starts = np.repeat(ends - counts, counts)
    begins = np.repeat(np.array([s.begin for s in spans]), counts)
    position = np.arange(len(sequence)) - starts + begins  # [T]

    def places(table: np.ndarray) -> torch.Tensor:  # [T]
        pages = table[sequence, position // page_tokens].astype(np.int64)
        return torch.from_numpy(pages * page_tokens + position % page_tokens)

    windows = _page_table([s.window for s in spans]) if spans[0].window else None
    logit_rows = [np.arange(end - s.logits, end) for end, s in zip(ends, spans, strict=True)]
    return StepInput(
        ids=torch.from_numpy(np.concatenate([np.asarray(s.ids, np.int64) for s in spans])),
        position=torch.from_numpy(position.astype(np.int32)),
        sequence=torch.from_numpy(sequence),
        place=places(table),
        page_table=torch.from_numpy(table),
        logit_rows=torch.from_numpy(np.concatenate(logit_rows).astype(np.int64)),
        states=tuple(
            _state_span(span.states, int(row), span.begin)
            for span, row in zip(spans, ends - counts, strict=True)
            if span.states and not span.window
        ),
        window_place=None if windows is None else places(windows),
        window_table=None if windows is None else torch.from_numpy(windows),
    )


def _page_table(pages: Seq[Seq[int]]) -> np.ndarray:
    """[B, M] int32: the pages of each sequence, then zeros."""
    table = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, of_sequence in zip(table, pages, strict=True):
        row[: len(of_sequence)] = of_sequence
    return table


def _state_span(moves: StateMoves, row: int, begin: int) -> StateSpan:
    """From positions in a sequence to rows of the step."""
    targets = tuple((row + position - begin, slot) for position, slot in moves.targets)
    return StateSpan(row, moves.source, targets)
