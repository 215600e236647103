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
    states: StateMoves | None = None  # of a model with recurrent layers

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
    table = np.zeros((len(spans), max(len(s.pages) for s in spans)), np.int32)  # [B, M]
    for row, span in zip(table, spans, strict=True):
        row[: len(span.pages)] = np.asarray(span.pages, np.int32) * page_stride
    sequence = np.repeat(np.arange(len(spans), dtype=np.int32), counts)  # [T]
    ends = np.cumsum(counts)
    starts = np.repeat(ends - counts, counts)
    begins = np.repeat(np.array([s.begin for s in spans]), counts)
    position = np.arange(len(sequence)) - starts + begins  # [T]
    pages = table[sequence, position // page_tokens].astype(np.int64)
    logit_rows = [np.arange(end - s.logits, end) for end, s in zip(ends, spans, strict=True)]
    return StepInput(
        ids=torch.from_numpy(np.concatenate([np.asarray(s.ids, np.int64) for s in spans])),
        position=torch.from_numpy(position.astype(np.int32)),
        sequence=torch.from_numpy(sequence),
        place=torch.from_numpy(pages * page_tokens + position % page_tokens),
        page_table=torch.from_numpy(table),
        logit_rows=torch.from_numpy(np.concatenate(logit_rows).astype(np.int64)),
        states=tuple(
            _state_span(span.states, int(row), span.begin)
            for span, row in zip(spans, ends - counts, strict=True)
            if span.states
        ),
    )


def _state_span(moves: StateMoves, row: int, begin: int) -> StateSpan:
    """From positions in a sequence to rows of the step."""
    targets = tuple((row + position - begin, slot) for position, slot in moves.targets)
    return StateSpan(row, moves.source, targets)
