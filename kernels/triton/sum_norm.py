"""The sum over a row's experts, the residual stream and the norm behind it, in one launch.

    total[t] = x[t] + Σ_k weights[t, k] · y[t, k];   normed[t] = total[t] / rms(total[t]) · weight

A program a row: reads K*H numbers of y, from the caches. Waits for the CPU's answer as ``merge``
does. Sums in the order of k, rounded as the two operations apart. Reference: ``merge`` or
``add_up`` of ``kernels.divide``, then ``TorchOps.add_rms_norm``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..divide import Shared
from .divide import SLEEP_NS, merge, summed_by_all
from .launch import chained, let_next_start, wait_for_earlier
from .moe_decode import combine
from .numbers import INTERPRETED, power_of_2


@triton.jit
def _sum_norm_kernel(
    x, y, log, here, route_weights, weight, total, normed, asked, both, answer, box_y, eps,
    K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, SLEEP: tl.constexpr,
    CPU: tl.constexpr, SIGNAL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < H
    w = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    wait_for_earlier(CHAINED)
    delta = summed_by_all(
        y, log, here, route_weights, asked, both, answer, box_y, t, h,
        K, H, BLOCK, SLEEP, CPU, SIGNAL,
    )  # fmt: skip
    wide = tl.load(x + t * H + h, mask=inside, other=0.0) + delta
    tl.store(total + t * H + h, wide, mask=inside)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    tl.store(normed + t * H + h, (wide * scale * w).to(normed.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class RouteProducts:
    """``kernels.unsummed.Unsummed`` of a captured layer.

    Args:
        here: the routes that the GPU computed; those in ``log`` but not here are the CPU's.
        shared: None: the GPU computed all of them, and the two are the same.
    """

    y: torch.Tensor  # [T * K, H] float32, contiguous
    log: torch.Tensor  # [T, K] int32, contiguous, -1: not in use
    here: torch.Tensor  # [T, K] int32, contiguous
    weights: torch.Tensor  # [T, K] float32, contiguous
    shared: Shared | None = None

    def sum(self) -> torch.Tensor:  # [T, H] float32
        if self.shared is None:
            return combine(self.y, self.log, self.weights)
        return merge(self.shared, self.y, self.log, self.here, self.weights)

    def add_rms_norm(
        self,
        x: torch.Tensor,  # [T, H] float32, contiguous
        weight: torch.Tensor,  # [H]
        eps: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T, H]
        (T, K), H = self.log.shape, self.y.shape[1]
        assert x.shape == (T, H) and x.dtype == torch.float32 and weight.shape == (H,), x.shape
        assert all(a.is_contiguous() for a in (x, self.y, self.log, self.here, self.weights))
        total = torch.empty_like(x)
        normed = torch.empty(T, H, dtype=out_dtype, device=x.device)
        box = self.shared.mailbox if self.shared is not None else None
        asked, both = (self.shared.asked, self.shared.both) if self.shared else (self.log, self.log)
        answer, box_y = (box.answer.data_ptr(), box.y.data_ptr()) if box is not None else (0, 0)
        block = power_of_2(H)
        if T:
            _sum_norm_kernel[(T,)](
                x, self.y, self.log, self.here, self.weights, weight, total, normed,
                asked, both, answer, box_y, eps,
                K=K, H=H, BLOCK=block, SLEEP=SLEEP_NS, CPU=box is not None,
                SIGNAL=not INTERPRETED, num_warps=min(8, max(1, block // 256)), **chained(x),
            )  # fmt: skip
        return total, normed
