"""The experts of many rows: the sum of ``moe_decode``, as products of matrices on tensor cores.

Routes are sorted by expert on the device (``group``), the host knows none of it: the grid is as
large as any routing could need, and programs of blocks that are not needed end at once.
Compute-bound from some hundred rows an expert on: 6*H*I flops a route; each block of rows reads its
expert's weights once from memory or, for the blocks after it, from the cache.

1. gate-up: h = silu(gate x) · up x for the sorted routes, rounded to act;
2. down: y of each route, at the route's own place;
3. combine: the weighted sum, in the order of k (``moe_decode.combine``).

Scratch: I numbers in act and H in float32 for each route. Reference: ``TorchOps.moe``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..formats import ExpertLayout
from .group import group
from .moe_decode import alignment, combine, matrix
from .numbers import TL_DTYPE, wide_dot


@triton.jit
def _gate_up_kernel(
    x, route, block_expert, block_begin, block_end, address, h, E,
    K: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    GATE: tl.constexpr, UP: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (I + BN - 1) // BN
    block = tl.program_id(0) // tiles
    expert = tl.load(block_expert + block)
    if expert < E:
        record = tl.load(address + expert)
        gate = matrix(record + GATE, W, ALIGN)
        up = matrix(record + UP, W, ALIGN)
        at = tl.load(block_begin + block) + tl.arange(0, BM)
        used = at < tl.load(block_end + block)
        row = tl.load(route + at, mask=used, other=0) // K
        n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        acc_gate = tl.zeros([BM, BN], tl.float32)
        acc_up = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, H, BK, num_stages=STAGES):
            c = start + k
            a = tl.load(
                x + row[:, None] * H + c[None, :], mask=used[:, None] & (c < H)[None, :], other=0.0
            )
            inside = (c < H)[:, None] & (n < I)[None, :]
            g = tl.load(gate + n[None, :] * H + c[:, None], mask=inside, other=0.0)
            u = tl.load(up + n[None, :] * H + c[:, None], mask=inside, other=0.0)
            if WIDE:
                a = a.to(tl.float32)
                g = g.to(tl.float32)
                u = u.to(tl.float32)
            acc_gate = tl.dot(a, g, acc_gate, input_precision="ieee")
            acc_up = tl.dot(a, u, acc_up, input_precision="ieee")
        value = acc_gate / (1.0 + tl.exp(-acc_gate)) * acc_up
        tl.store(
            h + at[:, None] * I + n[None, :],
            value.to(h.dtype.element_ty),
            mask=used[:, None] & (n < I)[None, :],
        )


@triton.jit
def _down_kernel(
    h, route, block_expert, block_begin, block_end, address, y, E,
    H: tl.constexpr, I: tl.constexpr, DOWN: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (H + BN - 1) // BN
    block = tl.program_id(0) // tiles
    expert = tl.load(block_expert + block)
    if expert < E:
        record = tl.load(address + expert)
        down = matrix(record + DOWN, W, ALIGN)
        at = tl.load(block_begin + block) + tl.arange(0, BM)
        used = at < tl.load(block_end + block)
        n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        acc = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, I, BK, num_stages=STAGES):
            c = start + k
            a = tl.load(
                h + at[:, None] * I + c[None, :], mask=used[:, None] & (c < I)[None, :], other=0.0
            )
            inside = (c < I)[:, None] & (n < H)[None, :]
            w = tl.load(down + n[None, :] * I + c[:, None], mask=inside, other=0.0)
            if WIDE:
                a = a.to(tl.float32)
                w = w.to(tl.float32)
            acc = tl.dot(a, w, acc, input_precision="ieee")
        to = tl.load(route + at, mask=used, other=0)
        tl.store(y + to[:, None] * H + n[None, :], acc, mask=used[:, None] & (n < H)[None, :])


class Tile(NamedTuple):
    rows: int
    columns: int  # of the output
    inner: int
    warps: int
    stages: int


def tile_of(routes_per_expert: float, act: torch.dtype) -> Tile:
    """Tile sizes by how many rows an expert gets on average, within 100 KB of shared memory."""
    if act == torch.float32:
        return Tile(32, 32, 32, 4, 1)
    if routes_per_expert <= 16:
        return Tile(16, 64, 128, 4, 3)
    if routes_per_expert <= 48:
        return Tile(32, 64, 64, 4, 4)
    if routes_per_expert <= 96:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 64, 64, 4, 3)


def moe_prefill(
    x: torch.Tensor,  # [T, H] act, contiguous
    ids: torch.Tensor,  # [T, K] int32, contiguous, -1: route not in use
    weights: torch.Tensor,  # [T, K] float32, contiguous
    address: torch.Tensor,  # [E] int64, contiguous
    layout: ExpertLayout,
) -> torch.Tensor:  # [T, H] float32
    (T, H), K, E = x.shape, ids.shape[1], address.shape[0]
    inner = layout.inner
    assert layout.hidden == H and ids.shape == weights.shape, (x.shape, ids.shape)
    assert all(a.is_contiguous() for a in (x, ids, weights, address)), (x.stride(), ids.stride())
    assert address.dtype == torch.int64, address.dtype
    tile = tile_of(T * K / E, x.dtype)
    blocks = group(ids, E, tile.rows)
    h = torch.empty(T * K, inner, dtype=x.dtype, device=x.device)
    y = torch.empty(T * K, H, dtype=torch.float32, device=x.device)
    wide = wide_dot(x.dtype) or layout.format.dtype != x.dtype
    shared = dict(  # noqa: C408 - arguments, as a call spells them
        H=H, I=inner, W=TL_DTYPE[layout.format.dtype], ALIGN=alignment(layout),
        BM=tile.rows, BN=tile.columns, BK=tile.inner, STAGES=tile.stages, WIDE=wide,
        num_warps=tile.warps,
    )  # fmt: skip
    num_blocks = len(blocks.expert)
    _gate_up_kernel[(num_blocks * triton.cdiv(inner, tile.columns),)](
        x, *blocks, address, h, E, K=K, GATE=layout.gate_offset, UP=layout.up_offset, **shared
    )
    _down_kernel[(num_blocks * triton.cdiv(H, tile.columns),)](
        h, *blocks, address, y, E, DOWN=layout.down_offset, **shared
    )
    return combine(y, ids, weights)
