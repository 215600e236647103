"""What one forward pass is given: a packed batch of rows from any number of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftd.kernels.delta import States


@dataclass(frozen=True, slots=True)
class StepInput:
    """T rows of B sequences, prefill chunks and decode tokens alike, each sequence's in order."""

    ids: torch.Tensor  # [T] int64, token ids
    position: torch.Tensor  # [T] int32, place in the sequence, from 0
    sequence: torch.Tensor  # [T] int32, row of page_table
    place: torch.Tensor  # [T] int64, page * page_tokens + offset: where the row's KV goes
    page_table: torch.Tensor  # [B, M] int32, pages in order; unused entries 0
    logit_rows: torch.Tensor | None  # [R] int64, rows whose logits are wanted; None: all
    states: States = ()  # of every sequence, if the model has recurrent layers
    active: torch.Tensor | None = None  # [T] bool, rows that choose experts; None: all
    # As ``place`` and ``page_table``, of layers with pages of their own (``ftd.kv.window_cache``):
    window_place: torch.Tensor | None = None  # [T] int64
    window_table: torch.Tensor | None = None  # [B, M] int32

    def to(self, device: torch.device) -> StepInput:
        """The same step with its tensors there."""
        values = {name: getattr(self, name) for name in self.__slots__}
        tensors = {name: x.to(device) for name, x in values.items() if isinstance(x, torch.Tensor)}
        return StepInput(**(values | tensors))
