"""The CPU's part of a prompt's layer, beside the link: missed experts that have few tokens.

To the link all experts are alike; the CPU is quick where it only reads. What it computes are the
products of routes, which then stand where the GPU's would, so the sum is the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ftd.experts.split import PromptRates, prompt_share, shared_s
from ftd.kernels.activation import Activation
from ftd.kernels.cpu.native import NativeOps
from ftd.kernels.formats import ExpertLayout

from .tables import Marker, bring

MOST_ROUTES = 2048  # of a layer: what goes there and comes back stays in the processor's caches
# Of a layer: to gather activations, to wake the threads, to bring products back. Until it is known.
FIXED_S = 1e-3
KEPT = 0.7  # of what was known, at each measurement


@dataclass(frozen=True, slots=True)
class Busy:
    """What the engine thread does in a layer besides computing experts."""

    launch_s: float
    pause_s: float  # steps of others


@dataclass(frozen=True, slots=True)
class Part:
    """One layer's question."""

    row: int
    ids: torch.Tensor  # [R, 1] int32
    routes: np.ndarray  # [R] int64, rising: where the products belong
    where: torch.Tensor  # the same on the device
    gathered: Marker
    begin_s: float  # what it took so far


@dataclass(frozen=True, slots=True)
class Products:
    """What the CPU has computed, on the device."""

    part: Part
    y: torch.Tensor  # [R, H] float32

    def store(self, y: torch.Tensor, first: int) -> None:
        """Into ``y`` [n, H] float32: those of the routes from ``first`` on."""
        begin, end = np.searchsorted(self.part.routes, (first, first + len(y)))
        if begin < end:
            y.index_copy_(0, self.part.where[begin:end] - first, self.y[begin:end])


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
        self._fixed_s, self._expected_s = FIXED_S, 0.0
        self._ops, self._address = ops, address
        self._layout, self._activation, self._device = layout, activation, device
        pin = device.type == "cuda"
        self._x = torch.empty(MOST_ROUTES, layout.hidden, dtype=act, pin_memory=pin)
        self._y = torch.empty(MOST_ROUTES, layout.hidden, pin_memory=pin)
        self._pinned: dict[str, torch.Tensor] = {}  # what is on its way to the device
        self._taken = Marker(device)  # what lies in ``_y`` has gone

    def choose(
        self, missed: Sequence[int], tokens: Sequence[int], on_link: int, busy: Busy
    ) -> tuple[Sequence[int], float]:
        """Those of ``missed`` that the CPU computes; ``tokens`` of each, rising.

        Args:
            on_link: more experts that take the link.
            busy: the engine thread cannot compute then, and the link goes on meanwhile.
        Returns:
            Also which part of the pause costs the layer nothing.
        """
        if self.rates is None:
            return (), 0.0
        most = int(np.searchsorted(np.cumsum(tokens), MOST_ROUTES, side="right"))
        rates = replace(self.rates, fixed_s=self._fixed_s)

        def share(busy_s: float) -> tuple[int, float]:
            taken = min(most, prompt_share(rates, tokens, on_link, busy_s))
            return taken, shared_s(rates, tokens, taken, on_link, busy_s)

        taken, layer_s = share(busy.launch_s + busy.pause_s)
        self._expected_s = sum(map(rates.expert_s, tokens[:taken]))
        free = 0.0
        if busy.pause_s:
            lost_s = layer_s - share(busy.launch_s)[1]
            free = 1 - min(1.0, max(0.0, lost_s / busy.pause_s))
        return missed[:taken], free

    def begin(
        self,
        row: int,
        x: torch.Tensor,  # [T, H] act
        chosen: np.ndarray,  # [T, K] int32
        theirs: Sequence[int],
    ) -> tuple[Part, torch.Tensor]:
        """Queue what brings the activations; also the routes of the others, [T, K] int32."""
        began_s = time.perf_counter()
        asked = np.isin(chosen, theirs)
        routes = np.flatnonzero(asked)
        count = len(routes)
        where = self._bring("routes", routes)
        rows = x.index_select(0, where // chosen.shape[1])
        self._x[:count].copy_(rows, non_blocking=True)
        gathered = Marker(self._device)
        gathered.mark()
        ids = torch.from_numpy(chosen.ravel()[routes].reshape(-1, 1))
        here = self._bring("here", np.where(asked, -1, chosen))
        return Part(row, ids, routes, where, gathered, time.perf_counter() - began_s), here

    def _bring(self, name: str, values: np.ndarray) -> torch.Tensor:
        """To the device; of the layer before all has been read, since this one knows its routes."""
        size = values.nbytes
        pinned = self._pinned.get(name)
        if pinned is None or len(pinned) < size:
            pin = self._device.type == "cuda"
            pinned = self._pinned[name] = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        given = torch.from_numpy(values)
        source = pinned[:size].view(given.dtype).view(given.shape)
        source.copy_(given)
        target = torch.empty(given.shape, dtype=given.dtype, device=self._device)
        bring(target, source)
        return target

    def finish(self, part: Part) -> Products:
        """Compute it, and queue its way to the device."""
        count, began_s = len(part.ids), time.perf_counter()
        part.gathered.wait()
        self._taken.wait()
        to = self._y[:count]
        self._ops.route_products(
            self._x[:count], part.ids, self._address[part.row], self._layout, self._activation, to
        )
        theirs = torch.empty(to.shape, device=self._device)
        bring(theirs, to)
        self._taken.mark()
        took_s = part.begin_s + time.perf_counter() - began_s
        more_s = max(0.0, took_s - self._expected_s)
        self._fixed_s = KEPT * self._fixed_s + (1 - KEPT) * more_s
        return Products(part, theirs)
