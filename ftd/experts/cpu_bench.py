"""Measures the CPU's part of the experts: the operations that serve, over the host pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from ftd.experts.measure import routes
from ftd.experts.profile import Key
from ftd.kernels.activation import Activation
from ftd.kernels.cpu.native import NativeOps
from ftd.kernels.formats import ExpertLayout
from ftd.kernels.ops import Ops

LEAST_CALLS = 2
MANY_TOKENS = 32  # of one expert: more of them cost in proportion


class CpuBench:
    """``ftd.experts.measure.Bench`` of the CPU device: there is no link.

    Args:
        address: [N] int64, records in host memory.
    """

    gpu_name = ""
    has_link = has_hits = False
    has_cpu = True

    def __init__(
        self,
        key: Key,
        ops: Ops,
        layout: ExpertLayout,
        address: torch.Tensor,
        act: torch.dtype,
        experts_per_token: int,
        activation: Activation,
    ) -> None:
        self.key, self.expert_bytes = key, layout.payload_bytes
        self.experts_per_token = min(experts_per_token, len(address))
        self._ops, self._layout, self._address = ops, layout, address
        self._act, self._activation = act, activation
        self._random = np.random.default_rng(0)
        self.prefetch_bytes = ops.prefetch_bytes if isinstance(ops, NativeOps) else None

    def cpu_s(self, rows: int, experts: int, seconds: float) -> float:
        found: list[float] = []
        repeat(lambda: found.append(self.once(rows, experts)), seconds)
        return median(found)

    def once(self, rows: int, experts: int) -> float:
        """Compute experts drawn anew; the seconds it took, drawing not counted."""
        drawn = routes(self._random, rows, experts, self.experts_per_token, len(self._address))
        return self.compute(torch.from_numpy(drawn))

    def compute(self, ids: torch.Tensor) -> float:
        """The experts of ``ids`` [rows, K] int32; the seconds it took."""
        x = torch.full((len(ids), self._layout.hidden), 0.5, dtype=self._act)
        weights = torch.ones(ids.shape)
        if isinstance(self._ops, NativeOps):
            self._ops.pool.wake()
        began_s = time.perf_counter()
        self._ops.moe(x, ids, weights, self._address, self._layout, self._activation)
        return time.perf_counter() - began_s

    def cpu_row_s(self, seconds: float) -> float:
        found: list[float] = []

        def once() -> None:
            one = routes(self._random, 1, 1, 1, len(self._address))
            ids = torch.from_numpy(one).repeat(MANY_TOKENS, 1)
            found.append(self.compute(ids) / MANY_TOKENS)

        repeat(once, seconds)
        return median(found)

    def read_bytes_per_s(self, seconds: float) -> float:
        ops = self._ops
        if not isinstance(ops, NativeOps):
            return 0.0
        found: list[float] = []

        def once() -> None:
            chosen = self._random.integers(len(self._address), size=self.experts_per_token)
            records = self._address[torch.from_numpy(chosen)]
            began_s = time.perf_counter()
            ops.read(records, self.expert_bytes)
            found.append(len(records) * self.expert_bytes / (time.perf_counter() - began_s))

        repeat(once, seconds)
        return median(found)

    def link_s(self, rows: int, experts: int, seconds: float) -> float:
        raise AssertionError("there is no link")

    hits_s = link_s

    def beside(self, rows: int, experts: int, seconds: float) -> tuple[float, float]:
        raise AssertionError("there is no link")

    def link_asked_s(self, rows: int, seconds: float) -> float | None:
        return None

    def handshake_s(self, seconds: float) -> float | None:
        return None

    def fixed_s(self, rows: int, seconds: float) -> float | None:
        return None

    def close(self) -> None:
        pass


def repeat(work: Callable[[], None], seconds: float) -> None:
    """Call ``work`` for about so long, a few times at least."""
    deadline, calls = time.perf_counter() + seconds, 0
    while calls < LEAST_CALLS or time.perf_counter() < deadline:
        work()
        calls += 1
