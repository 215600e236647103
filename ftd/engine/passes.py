"""Layer borders of a step: where it looks at what has arrived, and a pass makes its pauses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ftd.model.architecture import Experts


def no_pause() -> None:
    """Of a step that nobody waits for."""


class PausingExperts(Experts, Protocol):
    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        pause: Callable[[], None] = no_pause,
    ) -> torch.Tensor:
        """``Experts.forward``; calls ``pause`` once, when steps of others disturb it least."""
        ...


@dataclass(frozen=True, slots=True)
class Borders:
    """``Experts`` for the model of one step.

    Args:
        beat: called at each border; raises if the step is to be given up.
        pause: called within each layer; runs steps of others.
    """

    experts: PausingExperts
    beat: Callable[[], None]
    pause: Callable[[], None] = no_pause

    def forward(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        self.beat()
        return self.experts.forward(layer, x, ids, weights, self.pause)
