"""``kernels.ops.Ops`` on CUDA tensors: launches only, never a wait for the device.

Launch grids depend on shapes alone, so every operation can be captured in a CUDA graph and replayed
with other contents. Numerics: the rounding points of ``TorchOps``, sums in float32 in an order that
depends on shapes and not on where weights or pages lie.
"""

from __future__ import annotations

import torch

from ..activation import SILU, Activation
from ..delta import DeltaWeights, LayerStates, StateRows, States
from ..formats import ExpertLayout, Matrix, PackedMatrix
from . import (
    attention,
    delta,
    delta_step,
    gates,
    linear,
    linear_scaled,
    moe_decode,
    moe_prefill,
    norms,
    route,
)
from .keys import settle_keys
from .moe_decode import Tuning

# A float32 copy of a larger weight matrix is made in slices of this size.
SLICE_BYTES = 64 << 20


class CudaOps:
    """See ``kernels.ops`` for shapes and rounding points.

    Args:
        tuning: of the experts' reads in decode.
    """

    name = "triton"

    def __init__(self, tuning: Tuning = moe_decode.DEFAULT) -> None:
        settle_keys()
        self.tuning = tuning
        # partial sums of cuBLAS, too, are float32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_tf32 = False

    def linear(
        self,
        x: torch.Tensor,  # [T, K] act
        weight: Matrix,  # [O, K]
        bias: torch.Tensor | None = None,  # [O]
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # [T, O]
        out_dtype = out_dtype or x.dtype
        if isinstance(weight, PackedMatrix):
            return linear_scaled.linear_scaled(x, weight, bias, out_dtype)
        if linear.takes(x, weight):
            return linear.linear_few_rows(x, weight, bias, out_dtype)
        if bias is not None:
            return (self._product(x, weight, torch.float32) + bias.float()).to(out_dtype)
        return self._product(x, weight, out_dtype)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        if x.dtype == weight.dtype:
            if out_dtype == x.dtype:
                return x @ weight.T
            if x.is_cuda:
                return torch.mm(x, weight.T, out_dtype=out_dtype)
        y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
        rows = max(1, SLICE_BYTES // (4 * weight.shape[1]))
        wide = x.float()
        for start in range(0, weight.shape[0], rows):
            part = weight[start : start + rows].float()
            y[:, start : start + rows] = wide @ part.T
        return y

    def moe(
        self,
        x: torch.Tensor,  # [T, H] act
        ids: torch.Tensor,  # [T, K] int32
        weights: torch.Tensor,  # [T, K] float32
        address: torch.Tensor,  # [E] int64: GPU memory or pinned host memory, mixed at will
        layout: ExpertLayout,
        activation: Activation = SILU,
        fill: torch.Tensor | None = None,  # [E] int64: where to store records as they are read
    ) -> torch.Tensor:  # [T, H] float32
        if x.shape[0] <= moe_decode.MAX_ROWS:
            return moe_decode.moe_decode(
                x, ids, weights, address, layout, fill, self.tuning, activation
            )
        assert fill is None, "records are stored as they are read only where each is read once"
        return moe_prefill.moe_prefill(x, ids, weights, address, layout, activation)

    def route_products(
        self,
        x: torch.Tensor,  # [T, H] act
        ids: torch.Tensor,  # [T, K] int32
        address: torch.Tensor,  # [E] int64
        layout: ExpertLayout,
        activation: Activation,
        fill: torch.Tensor | None = None,  # [E] int64: as in ``moe``
        both: torch.Tensor | None = None,  # [2] int32: as ``kernels.divide.Shared`` has it
    ) -> torch.Tensor:  # [T * K, H] float32
        """``moe`` before the sum: what each route in use adds, without its weight."""
        if x.shape[0] > moe_decode.MAX_ROWS:
            assert fill is None and both is None, "each expert is read once, and as a whole"
            return moe_prefill.route_products(x, ids, address, layout, activation)
        return moe_decode.route_products(
            x, ids, address, layout, fill, self.tuning, activation, both
        )

    def route(
        self,
        logits: torch.Tensor,  # [T, E] float32
        k: int,
        normalise: bool,
        active: torch.Tensor | None = None,  # [T] bool
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T, K] int32, [T, K] float32
        return route.route(logits, k, normalise, active)

    def attention(
        self,
        q: torch.Tensor,  # [T, N, D] act
        k_pages: torch.Tensor,  # [P, page_tokens, NKV, D] act
        v_pages: torch.Tensor,
        page_table: torch.Tensor,  # [B, M] int32
        sequence: torch.Tensor,  # [T] int32; negative: the row gives zeros
        position: torch.Tensor,  # [T] int32; negative: the row gives zeros
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # [T, N, D] act
        return attention.attention(
            q, k_pages, v_pages, page_table, sequence, position, scale, window, sinks
        )

    def split_heads(
        self,
        qkv: torch.Tensor,  # [T, N + 2 NKV, D] act
        num_heads: int,
        norms_of: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        turn: tuple[torch.Tensor, torch.Tensor] | None,
        interleaved: bool,
        place: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
    ) -> torch.Tensor:  # [T, N, D] act
        return norms.split_heads(
            qkv, num_heads, norms_of, eps, turn, interleaved, place, k_pages, v_pages
        )

    def write_kv(
        self,
        k: torch.Tensor,  # [T, NKV, D] act
        v: torch.Tensor,
        place: torch.Tensor,  # [T] int64; negative: not written
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
    ) -> None:
        norms.write_kv(k, v, place, k_pages, v_pages)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype
    ) -> torch.Tensor:
        return norms.rms_norm(x, weight, eps, out_dtype)

    def add_rms_norm(
        self,
        x: torch.Tensor,  # [T, H] float32
        delta: torch.Tensor,  # [T, H] float32
        weight: torch.Tensor,
        eps: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norms.add_rms_norm(x, delta, weight, eps, out_dtype)

    def rope(
        self,
        x: torch.Tensor,  # [T, N, D] act, changed in place
        cos: torch.Tensor,  # [T, R / 2] float32
        sin: torch.Tensor,
        interleaved: bool = False,
    ) -> torch.Tensor:
        return norms.rope(x, cos, sin, interleaved)

    def turns(
        self, position: torch.Tensor, inv_freq: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norms.turns(position, inv_freq, scale)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return norms.silu_mul(gate, up)

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gates.sigmoid_mul(x, gate)

    def add_gated(self, total: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gates.add_gated(total, x, gate)

    def delta(
        self,
        qkv: torch.Tensor,  # [T, C] act
        z: torch.Tensor,  # [T, NV DV] act
        b: torch.Tensor,  # [T, NV] float32
        a: torch.Tensor,  # [T, NV] float32
        weights: DeltaWeights,
        states: LayerStates,
        at: States,
    ) -> torch.Tensor:  # [T, NV DV] act
        if isinstance(at, StateRows):
            return delta_step.delta_step(qkv, z, b, a, weights, states, at)
        return delta.delta_chunks(qkv, z, b, a, weights, states, at)
