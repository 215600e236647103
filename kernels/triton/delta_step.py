"""One row of each sequence through the gated delta rule, from projections to the gated norm.

Memory-bound: reads and writes the state once, 8 NV DK DV bytes a row. A program owns a head of v
with its whole [DK, DV] state, so that one kernel does everything and every sum has one order.

Fit for a captured step: source and target slots are read from the device. A row without a target is
no sequence's: nothing is read or written for it, and its result is zero. Reference and formulas:
``TorchOps.delta``, ``delta``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..delta import UNIT_EPS, DeltaWeights, LayerStates, StateRows
from .delta import SLOT_ALIGN, log_decay, silu
from .launch import chained, let_next_start, wait_for_earlier
from .numbers import matrix, power_of_2, tl_dtype


@triton.jit
def _convolved(
    x, conv, old, new, goes_on, keeps, channel, inside, C: tl.constexpr, W: tl.constexpr
):
    """silu of some channels' convolution, rounded to act; moves their tail on where ``keeps``."""
    now = tl.load(x + channel, mask=inside, other=0.0)
    tap = tl.load(conv + (W - 1) * C + channel, mask=inside, other=0.0)
    acc = now.to(tl.float32) * tap
    for i in tl.static_range(W - 1):
        past = tl.load(old + i * C + channel, mask=inside & goes_on, other=0.0)
        acc += past.to(tl.float32) * tl.load(conv + i * C + channel, mask=inside, other=0.0)
        if i > 0:
            tl.store(new + (i - 1) * C + channel, past, mask=inside & keeps)
    tl.store(new + (W - 2) * C + channel, now, mask=inside & keeps)
    return silu(acc).to(now.dtype).to(tl.float32)


@triton.jit
def _step_kernel(
    qkv, z, b, a, conv, rate, bias, norm, address, source, target, y, recurrent, tail,
    row_stride, z_stride, gate_stride, unit_eps, norm_eps,
    NK: tl.constexpr, NV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
    ACT: tl.constexpr, ALIGN: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    C: tl.constexpr = 2 * NK * DK + NV * DV
    served: tl.constexpr = NV // NK
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1)
    e = tl.arange(0, DVP)
    values = e < DV
    at = (t * NV + n) * DV + e
    to = tl.load(target + t)
    if to < 0:
        tl.store(y + at, tl.zeros([DVP], tl.float32).to(ACT), mask=values)
    else:
        came = tl.load(source + t)
        goes_on = came >= 0
        before = tl.load(address + tl.maximum(came, 0))
        after = tl.load(address + to)
        old = matrix(before + tail, ACT, ALIGN)
        new = matrix(after + tail, ACT, ALIGN)
        x = qkv + t * row_stride
        d = tl.arange(0, DKP)
        keys = d < DK
        head = n // served
        leads = n % served == 0  # of the heads that share q and k, one moves their tail on
        q = _convolved(x, conv, old, new, goes_on, leads, head * DK + d, keys, C, W)
        k = _convolved(x, conv, old, new, goes_on, leads, (NK + head) * DK + d, keys, C, W)
        v = _convolved(x, conv, old, new, goes_on, True, 2 * NK * DK + n * DV + e, values, C, W)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + unit_eps) * (DK**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + unit_eps)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + t * gate_stride + n)))
        decay = tl.exp(
            log_decay(tl.load(a + t * gate_stride + n), tl.load(rate + n), tl.load(bias + n))
        )
        part = n * DK * DV + d[:, None] * DV + e[None, :]
        inside = keys[:, None] & values[None, :]
        state = matrix(before + recurrent, tl.float32, ALIGN)
        S = tl.load(state + part, mask=inside & goes_on, other=0.0) * decay
        change = (v - tl.sum(S * k[:, None], axis=0)) * beta
        S += k[:, None] * change[None, :]
        tl.store(matrix(after + recurrent, tl.float32, ALIGN) + part, S, mask=inside)
        o = tl.sum(S * q[:, None], axis=0)
        scale = tl.rsqrt(tl.sum(o * o, axis=0) / DV + norm_eps)
        gate = silu(tl.load(z + t * z_stride + n * DV + e, mask=values, other=0.0).to(tl.float32))
        o *= scale * tl.load(norm + e, mask=values, other=0.0) * gate
        tl.store(y + at, o.to(ACT), mask=values)


def delta_step(
    qkv: torch.Tensor,  # [T, C] act, rows of any stride
    z: torch.Tensor,  # [T, NV DV] act, rows of any stride
    b: torch.Tensor,  # [T, NV] float32, rows of one stride with a
    a: torch.Tensor,  # [T, NV] float32
    weights: DeltaWeights,
    states: LayerStates,
    rows: StateRows,
) -> torch.Tensor:  # [T, NV DV] act
    T = len(qkv)
    NV, DK, DV = weights.num_value_heads, weights.key_dim, weights.value_dim
    width, channels = weights.conv.shape
    assert qkv.shape == (T, channels) and z.shape == (T, NV * DV), (qkv.shape, z.shape)
    assert all(x.stride(1) == 1 for x in (qkv, z, b, a)) and b.stride() == a.stride(), b.stride()
    assert rows.source.shape == rows.target.shape == (T,), rows.source.shape
    y = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    _step_kernel[(T, NV)](
        qkv, z, b, a, weights.conv, weights.rate, weights.bias, weights.norm,
        states.address, rows.source, rows.target, y, states.recurrent, states.tail,
        qkv.stride(0), z.stride(0), a.stride(0), UNIT_EPS, weights.norm_eps,
        NK=weights.num_key_heads, NV=NV, DK=DK, DV=DV, W=width,
        ACT=tl_dtype(qkv.dtype), ALIGN=SLOT_ALIGN,
        DKP=power_of_2(DK), DVP=power_of_2(DV),
        num_warps=8, **chained(qkv),
    )  # fmt: skip
    return y
