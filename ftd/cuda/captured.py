"""The experts of a captured decode step: what each of its layers launches."""

from __future__ import annotations

import torch

from ftd.kernels.unsummed import Unsummed

from .residency import Residency


class CapturedExperts:
    """Leaves the routing in ``log``, for the host to read.

    Args:
        divided: misses are divided between link and CPU, and stored on the way. If not, the kernels
            read every expert where the table says, and nothing waits.
    """

    def __init__(self, experts: Residency, batch: int, *, divided: bool) -> None:
        self._division, self._divided = experts.division, divided
        self._rows = {layer: row for row, layer in enumerate(experts.layers)}
        shape = (len(experts.layers), batch, experts.experts_per_token)
        device = experts.table_rows().device
        self.log = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.active = torch.zeros(batch, dtype=torch.bool, device=device)  # set by the step
        self._here = torch.full(shape[1:], -1, dtype=torch.int32, device=device)
        self._chosen = [self._here] * len(experts.layers)

    @property
    def left(self) -> tuple[torch.Tensor, ...]:
        """What a step leaves for the host."""
        return (self.log, self._division.shared.report) if self._divided else (self.log,)

    def choose(
        self, layer: int, x: torch.Tensor, logits: torch.Tensor, k: int, normalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``ftd.model.architecture.Choosing``; what it divides here, ``forward`` does not again."""
        row, division = self._rows[layer], self._division
        if self._divided and len(x) == 1:
            weights = division.choose(
                row, x, logits, normalise, self.active, self.log[row], self._here
            )
            return self.log[row], weights
        return division.route(logits, k, normalise, self.active)

    def forward(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | Unsummed:
        row, division = self._rows[layer], self._division
        if self._divided:
            if len(x) > 1:
                division.divide(row, x, ids, self.active, self.log[row], self._here)
            return division.finish(row, x, weights, self.log[row], self._here)
        self._chosen[row] = ids  # rows that are not in use have chosen none
        if row + 1 == len(self._chosen):
            torch.stack(self._chosen, out=self.log)  # one launch instead of one a layer
        return division.undivided(row, x, ids, weights)
