"""Row-wise work between the matrix products; each kernel reads and writes its rows once.

- ``rms_norm``: x / sqrt(mean(x²) + eps) · weight, alone or behind an addition to the residual.
- ``silu_mul``: silu(gate) · up.
- ``rope``: the first R channels of each head turn in pairs by the row's angles.
- ``turns``: cos and sin of those angles.
- ``write_kv``: keys and values to their place in the pages.
- ``split_heads``: norm per head, rope and ``write_kv`` on the product of q, k and v, at once.

All in float32 inside but for ``turns``. Rounding points are those of the separate operations: a
head is rounded to act after its norm, before it turns. Reference: ``TorchOps`` and ``ComposedOps``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import chained, let_next_start, prefetch, wait_for_earlier
from .numbers import power_of_2


@triton.jit
def _rms_norm_kernel(
    x, delta, weight, total, y, eps,
    H: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    row = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BLOCK)
    inside = h < H
    w = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        prefetch(x + row + tl.minimum(h, H - 1), CHAINED)
    wait_for_earlier(CHAINED)
    wide = tl.load(x + row + h, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(delta + row + h, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row + h, wide, mask=inside)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    tl.store(y + row + h, (wide * scale * w).to(y.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,  # [..., H] any float, contiguous
    weight: torch.Tensor,  # [H]
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:  # [..., H]
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _launch_norm(x, None, weight, eps, None, y)
    return y


def add_rms_norm(
    x: torch.Tensor,  # [T, H] float32, contiguous
    delta: torch.Tensor,  # [T, H] float32, contiguous
    weight: torch.Tensor,  # [H]
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # x + delta float32, its norm
    assert x.shape == delta.shape and x.dtype == torch.float32, (x.shape, delta.shape, x.dtype)
    assert delta.is_contiguous(), delta.stride()
    total = torch.empty_like(x)
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _launch_norm(x, delta, weight, eps, total, y)
    return total, y


def _launch_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    H = x.shape[-1]
    assert x.is_contiguous() and weight.shape == (H,), (x.stride(), weight.shape)
    rows = x.numel() // H
    if rows == 0:
        return
    block = power_of_2(H)
    _rms_norm_kernel[(rows,)](
        x, delta if delta is not None else x, weight, total if total is not None else y, y, eps,
        H=H, ADD=delta is not None, BLOCK=block,
        num_warps=min(8, max(1, block // 256)), **chained(x),
    )  # fmt: skip


@triton.jit
def _silu_mul_kernel(
    gate, up, y, gate_stride, up_stride,
    I: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    g = tl.load(gate + t * gate_stride + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + t * up_stride + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + t * I + i, (g / (1.0 + tl.exp(-g)) * u).to(y.dtype.element_ty), mask=inside)


def silu_mul(
    gate: torch.Tensor,  # [T, I] any float, rows of any stride
    up: torch.Tensor,
) -> torch.Tensor:  # [T, I]
    (T, I), block = gate.shape, 1024
    assert gate.shape == up.shape and gate.stride(1) == up.stride(1) == 1, gate.stride()
    y = torch.empty(T, I, dtype=gate.dtype, device=gate.device)
    if T:
        _silu_mul_kernel[(T, triton.cdiv(I, block))](
            gate, up, y, gate.stride(0), up.stride(0), I=I, BLOCK=block, num_warps=4,
            **chained(gate),
        )  # fmt: skip
    return y


@triton.jit
def _turned(value, partner, d, t, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """One head's channels ``value`` turned, given for each channel the other one of its pair."""
    if INTERLEAVED:
        pair = d // 2
        first = d % 2 == 0
    else:
        pair = d % HALF
        first = d < HALF
    turning = d < 2 * HALF
    c = tl.load(cos + t * HALF + pair, mask=turning, other=1.0)
    s = tl.load(sin + t * HALF + pair, mask=turning, other=0.0)
    return value * c + tl.where(first, -partner, partner) * s


@triton.jit
def _partner_channel(d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other channel of each channel's pair; itself where nothing turns."""
    if INTERLEAVED:
        other = d ^ 1
    else:
        other = tl.where(d < HALF, d + HALF, d - HALF)
    return tl.where(d < 2 * HALF, other, d)


@triton.jit
def _rope_kernel(
    x, cos, sin, N: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    at = x + (t * N + tl.program_id(1)) * D
    d = tl.arange(0, BLOCK)
    other = _partner_channel(d, HALF, INTERLEAVED)
    value = tl.load(at + d, mask=d < D, other=0.0).to(tl.float32)
    partner = tl.load(at + other, mask=d < D, other=0.0).to(tl.float32)
    tl.debug_barrier()  # a channel is read by its partner's thread before it changes
    turned = _turned(value, partner, d, t, cos, sin, HALF, INTERLEAVED)
    tl.store(at + d, turned.to(x.dtype.element_ty), mask=d < 2 * HALF)


def rope(
    x: torch.Tensor,  # [T, N, D] act, contiguous, changed in place
    cos: torch.Tensor,  # [T, R / 2] float32
    sin: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    T, N, D = x.shape
    half = cos.shape[1]
    assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous(), x.stride()
    assert cos.shape == sin.shape == (T, half) and 2 * half <= D, (x.shape, cos.shape)
    if T:
        _rope_kernel[(T, N)](
            x, cos, sin, N=N, D=D, HALF=half, INTERLEAVED=interleaved, BLOCK=power_of_2(D),
            num_warps=1, **chained(x),
        )  # fmt: skip
    return x


@triton.jit
def _turns_kernel(
    position, inv_freq, cos, sin,
    SCALE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK)
    inside = r < HALF
    per_token = tl.load(inv_freq + r, mask=inside, other=0.0)
    angle = (tl.load(position + t).to(tl.float32) * per_token).to(tl.float64)
    tl.store(cos + t * HALF + r, (tl.cos(angle) * SCALE).to(tl.float32), mask=inside)
    tl.store(sin + t * HALF + r, (tl.sin(angle) * SCALE).to(tl.float32), mask=inside)


def turns(
    position: torch.Tensor,  # [T] int32, contiguous
    inv_freq: torch.Tensor,  # [R / 2] float32, contiguous
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # [T, R / 2] float32
    T, half = len(position), len(inv_freq)
    assert position.is_contiguous() and inv_freq.is_contiguous(), position.stride()
    cos = torch.empty(T, half, dtype=torch.float32, device=position.device)
    sin = torch.empty_like(cos)
    if T:
        _turns_kernel[(T,)](
            position, inv_freq, cos, sin,
            SCALE=scale, HALF=half, BLOCK=power_of_2(half), num_warps=1, **chained(position),
        )  # fmt: skip
    return cos, sin


@triton.jit
def _write_kv_kernel(
    k, v, place, k_pages, v_pages,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    to = tl.load(place + t)
    i = tl.arange(0, BLOCK)
    inside = (i < WIDTH) & (to >= 0)
    tl.store(k_pages + to * WIDTH + i, tl.load(k + t * WIDTH + i, mask=inside), mask=inside)
    tl.store(v_pages + to * WIDTH + i, tl.load(v + t * WIDTH + i, mask=inside), mask=inside)


def write_kv(
    k: torch.Tensor,  # [T, NKV, D] act, contiguous
    v: torch.Tensor,
    place: torch.Tensor,  # [T] int64; negative: the row is not written
    k_pages: torch.Tensor,  # [P, page_tokens, NKV, D] act, contiguous
    v_pages: torch.Tensor,
) -> None:
    T, width = k.shape[0], k.shape[1] * k.shape[2]
    assert k.is_contiguous() and v.is_contiguous() and k.shape == v.shape, (k.shape, v.shape)
    assert k_pages.is_contiguous() and k_pages.dtype == k.dtype, (k_pages.dtype, k.dtype)
    if T:
        _write_kv_kernel[(T,)](
            k, v, place, k_pages, v_pages, WIDTH=width, BLOCK=power_of_2(width), num_warps=4,
            **chained(k),
        )  # fmt: skip


@triton.jit
def _split_heads_kernel(
    qkv, q_norm, k_norm, cos, sin, place, q, k_pages, v_pages, eps,
    N: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = qkv + (t * (N + 2 * NKV) + head) * D
    act: tl.constexpr = qkv.dtype.element_ty
    d = tl.arange(0, BLOCK)
    inside = d < D
    other = _partner_channel(d, HALF, INTERLEAVED)
    mine = 1.0
    theirs = 1.0
    if NORM:  # of v it is not used
        norm = q_norm
        if head >= N:
            norm = k_norm
        mine = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
        theirs = tl.load(norm + other, mask=inside, other=0.0).to(tl.float32)
    prefetch(place + t, CHAINED)
    if HALF > 0:
        prefetch(cos + t * HALF + tl.minimum(d, HALF - 1), CHAINED)
        prefetch(sin + t * HALF + tl.minimum(d, HALF - 1), CHAINED)
    wait_for_earlier(CHAINED)
    value = tl.load(at + d, mask=inside, other=0.0)
    to = tl.load(place + t)
    if head >= N + NKV:
        v_at = v_pages + (to * NKV + head - N - NKV) * D + d
        tl.store(v_at, value, mask=inside & (to >= 0))
    else:
        partner = tl.load(at + other, mask=inside, other=0.0)
        is_q = head < N
        if NORM:
            wide = value.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
            value = (wide * scale * mine).to(act)
            partner = (partner.to(tl.float32) * scale * theirs).to(act)
        if HALF > 0:
            turned = _turned(
                value.to(tl.float32), partner.to(tl.float32), d, t, cos, sin, HALF, INTERLEAVED
            )
            value = tl.where(d < 2 * HALF, turned.to(act), value)
        if is_q:
            tl.store(q + (t * N + head) * D + d, value, mask=inside)
        else:
            k_at = k_pages + (to * NKV + head - N) * D + d
            tl.store(k_at, value, mask=inside & (to >= 0))


def split_heads(
    qkv: torch.Tensor,  # [T, N + 2 NKV, D] act, contiguous
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,  # [D] each, of q and k
    eps: float,
    turn: tuple[torch.Tensor, torch.Tensor] | None,  # cos, sin [T, R / 2] float32
    interleaved: bool,
    place: torch.Tensor,  # [T] int64; negative: k and v of the row are not written
    k_pages: torch.Tensor,  # [P, page_tokens, NKV, D] act, contiguous
    v_pages: torch.Tensor,
) -> torch.Tensor:  # [T, N, D] act
    T, heads, D = qkv.shape
    kv_heads = k_pages.shape[2]
    assert heads == num_heads + 2 * kv_heads and k_pages.shape[3] == D, (qkv.shape, k_pages.shape)
    assert qkv.is_contiguous() and k_pages.is_contiguous() and v_pages.is_contiguous()
    assert qkv.dtype == k_pages.dtype == v_pages.dtype, (qkv.dtype, k_pages.dtype)
    q = torch.empty(T, num_heads, D, dtype=qkv.dtype, device=qkv.device)
    if T == 0:
        return q
    cos, sin = turn if turn else (qkv, qkv)  # any pointer: not read
    q_norm, k_norm = norms if norms else (qkv, qkv)
    _split_heads_kernel[(T, heads)](
        qkv, q_norm, k_norm, cos, sin, place, q, k_pages, v_pages, eps,
        N=num_heads, NKV=kv_heads, D=D, HALF=turn[0].shape[1] if turn else 0,
        NORM=norms is not None, INTERLEAVED=interleaved,
        BLOCK=power_of_2(D),
        num_warps=1, **chained(qkv),
    )  # fmt: skip
    return q
