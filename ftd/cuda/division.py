"""How captured steps divide a layer's experts between slots, link and CPU: tables and launches.

The device side is ``kernels.divide``: what lies here are the host's copies of what it reads, sent
in stream order, and the layers of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Protocol

import numpy as np
import torch

from ftd.kernels import divide as reference
from ftd.kernels.activation import Activation
from ftd.kernels.blocks import token_blocks
from ftd.kernels.divide import Shared, new_shared
from ftd.kernels.formats import ExpertLayout
from ftd.kernels.ops import Ops
from ftd.kernels.unsummed import Unsummed

from .cpu_experts import CpuExperts
from .prompt_share import Products
from .tables import Upload

MOST_LENT = 64  # slots that one step may fill


class Kernels(Protocol):
    """What a layer of a captured step launches; see ``kernels.divide``."""

    def divide(
        self, shared: Shared, row: int, ids: torch.Tensor, active: torch.Tensor, x: torch.Tensor,
        log: torch.Tensor, here: torch.Tensor,
    ) -> None: ...  # fmt: skip

    def choose_and_divide(
        self, ops: Any, shared: Shared, row: int, logits: torch.Tensor, normalise: bool,
        active: torch.Tensor, x: torch.Tensor, log: torch.Tensor, here: torch.Tensor,
    ) -> torch.Tensor: ...  # fmt: skip

    def products(
        self, ops: Any, shared: Shared, row: int, x: torch.Tensor, here: torch.Tensor,
        layout: ExpertLayout, activation: Activation,
    ) -> torch.Tensor: ...  # fmt: skip

    def route_products(
        self, ops: Any, x: torch.Tensor, ids: torch.Tensor, address: torch.Tensor,
        layout: ExpertLayout, activation: Activation,
    ) -> torch.Tensor: ...  # fmt: skip

    def add_up(self, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...

    def merge(
        self, shared: Shared, y: torch.Tensor, log: torch.Tensor, here: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor: ...  # fmt: skip


# Of y, log, here, weights and what they share: the sum, left to the norm behind it.
Later = Callable[..., Unsummed]


class Division:
    """
    Args:
        address: [L, E] int64 on the device: the table of captured steps.
        slots: [begin, end) of slots' addresses.
        cpu: None: every miss is read over the link.
    """

    def __init__(
        self,
        ops: Ops,
        layout: ExpertLayout,
        activation: Activation,
        address: torch.Tensor,
        slots: tuple[int, int],
        cpu: CpuExperts | None,
    ) -> None:
        self.cpu = cpu
        self._ops, self._layout, self._activation = ops, layout, activation
        mailbox = cpu.mailbox if cpu else None
        self.shared = new_shared(address, MOST_LENT, slots, mailbox, layout)
        self._kernels: Kernels = reference
        self._later: Later | None = None
        if address.is_cuda:
            from ftd.kernels.triton import divide
            from ftd.kernels.triton.sum_norm import RouteProducts

            self._kernels, self._later = divide, RouteProducts
        self._worth = Upload(self.shared.worth)
        self._fetch_of = Upload(self.shared.fetch_of)
        self._lent = Upload(self.shared.lent)
        self._told_lent: tuple[int, ...] = ()
        self._tables: tuple[torch.Tensor | None, torch.Tensor | None] = None, None

    # ---- a layer of a captured step

    def route(
        self, logits: torch.Tensor, k: int, normalise: bool, active: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T, K] int32 and float32
        return self._ops.route(logits, k, normalise, active)

    def divide(
        self,
        row: int,
        x: torch.Tensor,  # [T, H] act
        ids: torch.Tensor,  # [T, K] int32
        active: torch.Tensor,  # [T] bool
        log: torch.Tensor,  # [T, K] int32, written: the choice, -1 in rows not in use
        here: torch.Tensor,  # [T, K] int32, written: what the GPU computes
    ) -> None:
        """Who computes what; the CPU begins."""
        if row == 0:
            self.shared.begin_step()
        self._kernels.divide(self.shared, row, ids, active, x, log, here)

    def choose(
        self,
        row: int,
        x: torch.Tensor,  # [1, H] act
        logits: torch.Tensor,  # [1, E] float32
        normalise: bool,
        active: torch.Tensor,  # [1] bool
        log: torch.Tensor,  # [1, K] int32, written as by ``divide``
        here: torch.Tensor,  # [1, K] int32
    ) -> torch.Tensor:  # [1, K] float32, the weights
        """``route`` and ``divide`` of one row."""
        if row == 0:
            self.shared.begin_step()
        return self._kernels.choose_and_divide(
            self._ops, self.shared, row, logits, normalise, active, x, log, here
        )

    def finish(
        self,
        row: int,
        x: torch.Tensor,  # [T, H] act
        weights: torch.Tensor,  # [T, K] float32
        log: torch.Tensor,  # [T, K] int32
        here: torch.Tensor,  # [T, K] int32
    ) -> torch.Tensor | Unsummed:  # [T, H] float32
        """What is left of a layer that has been divided."""
        shared, kernels = self.shared, self._kernels
        y = kernels.products(self._ops, shared, row, x, here, self._layout, self._activation)
        if self._later is not None:
            return self._later(y, log, here, weights, shared)
        return kernels.merge(shared, y, log, here, weights)

    def undivided(
        self, row: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | Unsummed:  # [T, H] float32
        """Every expert is read where the table says; nothing is stored, nobody asked."""
        address = self.shared.address[row]
        if self._later is not None:
            y = self._kernels.route_products(
                self._ops, x, ids, address, self._layout, self._activation
            )
            return self._later(y, ids, ids, weights)
        return self._ops.moe(x, ids, weights, address, self._layout, self._activation)

    def with_theirs(
        self,
        x: torch.Tensor,  # [T, H] act, of a prompt
        ids: torch.Tensor,  # [T, K] int32
        here: torch.Tensor,  # [T, K] int32: without those that others compute
        weights: torch.Tensor,  # [T, K] float32
        address: torch.Tensor,  # [E] int64
        compute: Callable[[], Products],  # while the first block of tokens is on its way
    ) -> torch.Tensor:  # [T, H] float32
        """A layer some of whose products come from elsewhere."""
        kernels, (tokens, k) = self._kernels, ids.shape
        theirs: Products | None = None
        blocks = []
        for at in token_blocks(tokens, k, x.shape[1]):
            y = kernels.route_products(
                self._ops, x[at], here[at], address, self._layout, self._activation
            )
            theirs = theirs or compute()
            theirs.store(y, at.start * k)
            blocks.append(kernels.add_up(y, ids[at], weights[at]))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def aside(self, shared: Shared) -> Division:
        """Layers that share nothing with the steps that serve but what ``shared`` does."""
        other = copy(self)
        other.shared = shared
        return other

    # ---- between steps

    @property
    def parts(self) -> int:
        """Into how many an expert may be divided between link and CPU."""
        return self.shared.parts

    def split(
        self,
        fetch_of: Sequence[Sequence[float]],
        beside: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """For 1, 2, 4 and 8 rows: for each number of misses of a layer, how many take the link.

        In experts, to the nearest part. More misses than a table knows count as its last.

        Args:
            beside: the same in the pauses of a pass; None: nothing else.
        """
        usual = self._in_parts(fetch_of)
        self._tables = usual, self._in_parts(beside) if beside else None
        self._fetch_of.send(usual)

    def _in_parts(self, fetch_of: Sequence[Sequence[float]]) -> torch.Tensor:
        rows, most = self.shared.fetch_of.shape
        assert len(fetch_of) == rows, len(fetch_of)
        tables = [[*table, *[table[-1]] * most][:most] for table in fetch_of]
        parts = (torch.tensor(tables, dtype=torch.float64) * self.parts).round()
        return parts.to(torch.int32)

    @contextmanager
    def beside_pass(self) -> Iterator[None]:
        """Steps launched inside divide as in its pauses."""
        usual, beside = self._tables
        if usual is None or beside is None:
            yield
            return
        self._fetch_of.send(beside)
        try:
            yield
        finally:
            self._fetch_of.send(usual)

    def judge(self, value: np.ndarray, admit: np.ndarray) -> None:
        """What experts are worth ([L, E], not negative), and which are worth storing."""
        worth = np.where(admit, value, -1 - value).astype(np.float32)
        self._worth.send(torch.from_numpy(worth))

    def lend(self, addresses: Sequence[int]) -> None:
        """Where the next step may store what it reads."""
        lent = tuple(addresses)
        if lent != self._told_lent:
            self._told_lent = lent
            padded = [*lent, *[0] * MOST_LENT][:MOST_LENT]
            self._lent.send(torch.tensor(padded, dtype=torch.int64))
