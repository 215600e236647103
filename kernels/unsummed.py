"""A layer's experts before they are added up: the norm behind them may take the sum in."""

from __future__ import annotations

from typing import Protocol

import torch


class Unsummed(Protocol):
    """Σ_k weights · y of each row, not computed yet."""

    def sum(self) -> torch.Tensor:  # [T, H] float32
        """In a launch of its own."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T, H] float32 and ``out_dtype``
        """As ``Ops.add_rms_norm`` with the sum as ``delta``, in one launch."""
        ...


def summed(y: torch.Tensor | Unsummed) -> torch.Tensor:  # [T, H] float32
    return y if isinstance(y, torch.Tensor) else y.sum()
