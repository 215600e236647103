"""What one forward pass is given: a packed batch of rows from any number of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Where the recurrent state of one sequence is read, and where later ones are written."""

    begin: int  # its first row in the step
    source: int | None  # slot of the state before that row; None: the sequence begins here
    # (row that comes after, slot) in order of rows; the last one is after the sequence's last row
    targets: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.targets[-1][0]


@dataclass(frozen=True, slots=True)
class StepInput:
    """T rows of B sequences, prefill chunks and decode tokens alike, each sequence's in order."""

    ids: torch.Tensor  # [T] int64, token ids
    position: torch.Tensor  # [T] int32, place in the sequence, from 0
    sequence: torch.Tensor  # [T] int32, row of page_table
    place: torch.Tensor  # [T] int64, page * page_tokens + offset: where the row's KV goes
    page_table: torch.Tensor  # [B, M] int32, pages in order; unused entries 0
    logit_rows: torch.Tensor  # [R] int64, rows whose logits are wanted
    states: tuple[StateSpan, ...] = ()  # of every sequence, if the model has recurrent layers
