"""How far ahead the C++ kernels ask for weights: measured on real experts, and set."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from ..formats import ExpertLayout
from .native import NativeOps

PREFETCH_CHOICES_BYTES = (0, 2048, 8192, 16384)
CALIBRATION_TOKENS = (1, 2)  # with more, AMX takes over and finds its own way


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured and set."""

    prefetch_bytes: tuple[int, int]  # for one token, for several
    expert_bytes_per_s: tuple[float, float]  # expert weights, for one token and for two
    read_bytes_per_s: float  # plain read of the same memory by the same threads


def calibrate(
    ops: NativeOps,
    layout: ExpertLayout,
    address: torch.Tensor,  # [E] int64, as for moe
    act: torch.dtype,
    experts_per_token: int,
    seconds: float = 1.0,
) -> Calibration:
    """Measure prefetch distances on real experts, set the best, report the rates reached.

    The best distance depends on the processor, the format and the number of tokens; a wrong one
    costs up to half the speed. Candidates take turns, so that noise meets them alike. Takes
    about ``seconds``, and longer where one round of all candidates does.
    """
    generator = torch.Generator().manual_seed(0)
    per_token = min(experts_per_token, address.numel())

    def draw() -> torch.Tensor:
        return torch.randperm(address.numel(), generator=generator)[:per_token]

    best, rates = [], []
    for tokens in CALIBRATION_TOKENS:
        x = torch.randn(tokens, layout.hidden, generator=generator).to(act)
        weights = torch.full((tokens, per_token), 1.0 / per_token)
        samples: dict[int, list[float]] = {c: [] for c in PREFETCH_CHOICES_BYTES}
        deadline = time.perf_counter() + seconds * 0.45
        while time.perf_counter() < deadline or not all(samples.values()):
            for choice in PREFETCH_CHOICES_BYTES:
                ops.set_prefetch(layout, choice, choice)
                ids = draw().to(torch.int32).repeat(tokens, 1)
                ops.pool.wake()
                begin = time.perf_counter()
                ops.moe(x, ids, weights, address, layout)
                samples[choice].append(time.perf_counter() - begin)
        took = {choice: median(values) for choice, values in samples.items()}
        best.append(min(took, key=took.__getitem__))
        rates.append(per_token * layout.payload_bytes / took[best[-1]])
    ops.set_prefetch(layout, best[0], best[1])

    reads: list[float] = []
    deadline = time.perf_counter() + seconds * 0.1
    while time.perf_counter() < deadline or not reads:
        records = address[draw()]
        begin = time.perf_counter()
        ops.read(records, layout.payload_bytes)
        reads.append(per_token * layout.payload_bytes / (time.perf_counter() - begin))
    return Calibration((best[0], best[1]), (rates[0], rates[1]), median(reads))
