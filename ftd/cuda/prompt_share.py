"""The CPU's part of a prompt's layer, beside the link: missed experts that have few tokens.

To the link all experts are alike; the CPU is quick where it only reads. What it computes are the
products of routes, which then stand where the GPU's would, so the sum is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ftd.experts.split import PromptRates, prompt_share
from ftd.kernels.activation import Activation
from ftd.kernels.cpu.native import NativeOps
from ftd.kernels.formats import ExpertLayout

from .tables import Marker

MOST_ROUTES = 2048  # of a layer: what goes there and comes back stays in the processor's caches
FIXED_S = 150e-6  # of a layer: to gather activations, and to bring products back


@dataclass(frozen=True, slots=True)
class Part:
    """One layer's question."""

    row: int
    ids: torch.Tensor  # [R, 1] int32
    routes: torch.Tensor  # [R] int64, on the device: where the products belong
    gathered: Marker


class PromptShare:
    """
    Args:
        address: [L, E] int64, records in host memory.
    """

    def __init__(
        self,
        ops: NativeOps,
        address: torch.Tensor,
        layout: ExpertLayout,
        activation: Activation,
        act: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rates: PromptRates | None = None  # None: the CPU takes nothing
        self._ops, self._address = ops, address
        self._layout, self._activation, self._device = layout, activation, device
        pin = device.type == "cuda"
        self._x = torch.empty(MOST_ROUTES, layout.hidden, dtype=act, pin_memory=pin)
        self._y = torch.empty(MOST_ROUTES, layout.hidden, pin_memory=pin)
        self._taken = Marker(device)  # what lies in ``_y`` has gone

    def choose(self, missed: Sequence[int], tokens: Sequence[int], on_link: int) -> Sequence[int]:
        """Those of ``missed`` that the CPU computes; ``tokens`` of each, rising.

        Args:
            on_link: more experts that take the link.
        """
        if self.rates is None:
            return ()
        fitting = int(np.searchsorted(np.cumsum(tokens), MOST_ROUTES, side="right"))
        rates = replace(self.rates, fixed_s=self.rates.fixed_s + FIXED_S)
        return missed[: min(fitting, prompt_share(rates, tokens, on_link))]

    def begin(
        self,
        row: int,
        x: torch.Tensor,  # [T, H] act
        chosen: np.ndarray,  # [T, K] int32
        theirs: Sequence[int],
    ) -> tuple[Part, torch.Tensor]:
        """Queue what brings the activations; also the routes of the others, [T, K] int32."""
        asked = np.isin(chosen, theirs)
        routes = np.flatnonzero(asked)
        count = len(routes)
        where = torch.from_numpy(routes).to(self._device)
        rows = x.index_select(0, where // chosen.shape[1])
        self._x[:count].copy_(rows, non_blocking=True)
        gathered = Marker(self._device)
        gathered.mark()
        ids = torch.from_numpy(chosen.ravel()[routes].reshape(-1, 1))
        here = torch.from_numpy(np.where(asked, -1, chosen)).to(self._device)
        return Part(row, ids, where, gathered), here

    def finish(self, part: Part, y: torch.Tensor) -> None:
        """Compute it, and queue its way into ``y`` [T * K, H] float32."""
        count = len(part.ids)
        part.gathered.wait()
        self._taken.wait()
        to = self._y[:count]
        self._ops.route_products(
            self._x[:count], part.ids, self._address[part.row], self._layout, self._activation, to
        )
        y.index_copy_(0, part.routes, to.to(self._device, non_blocking=True))
        self._taken.mark()
