"""Layer borders of a step: where it looks at what has arrived, and a pass makes its pauses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ftd.experts.pause import NO_PAUSE, Pause
from ftd.model.architecture import Experts


class PausingExperts(Experts, Protocol):
    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        pause: Pause = NO_PAUSE,
    ) -> torch.Tensor:
        """``Experts.forward``; makes the pause once, when steps of others disturb it least."""
        ...


@dataclass(frozen=True, slots=True)
class Borders:
    """``Experts`` for the model of one step.

    Args:
        beat: called at each border; raises if the step is to be given up.
        pause: made within each layer; runs steps of others.
    """

    experts: PausingExperts
    beat: Callable[[], None]
    pause: Pause = NO_PAUSE

    def forward(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        self.beat()
        return self.experts.forward(layer, x, ids, weights, self.pause)
