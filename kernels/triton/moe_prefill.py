"""The experts of many rows: the sum of ``moe_decode``, as products of matrices on tensor cores.

Routes are sorted by expert on the device (``group``), the host knows none of it: the grid is as
large as any routing could need, and programs of blocks that are not needed end at once.
Compute-bound from some hundred rows an expert on: 6*H*I flops a route; each block of rows reads its
expert's weights once from memory or, for the blocks after it, from the cache.

1. gate-up: h = silu(gate x) · up x for the sorted routes, rounded to act;
2. down: y of each route, at the route's own place;
3. combine: the weighted sum, in the order of k (``moe_decode.combine``).

Scratch: I numbers in act and H in float32 for each route, of a block of tokens at a time
(``kernels.blocks``). Reference: ``TorchOps.moe``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..activation import SILU, Activation
from ..blocks import token_blocks
from ..formats import ExpertLayout
from .activate import activate
from .group import group
from .moe_decode import alignment, combine
from .scaled import dot_type, finish, stored
from .tiles import add_dot, scale_at, weights


@triton.jit
def _gate_up_kernel(
    x, route, block_expert, block_begin, block_end, address, h, E,
    K: tl.constexpr, G: tl.constexpr, U: tl.constexpr, A: tl.constexpr, ALIGN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    I: tl.constexpr = G.rows
    H: tl.constexpr = G.columns
    tiles: tl.constexpr = (I + BN - 1) // BN
    block = tl.program_id(0) // tiles
    expert = tl.load(block_expert + block)
    if expert < E:
        record = tl.load(address + expert)
        at = tl.load(block_begin + block) + tl.arange(0, BM)
        used = at < tl.load(block_end + block)
        row = tl.load(route + at, mask=used, other=0) // K
        first_n = tl.program_id(0) % tiles * BN
        n = first_n + tl.arange(0, BN)
        acc_gate = tl.zeros([BM, BN], tl.float32)
        acc_up = tl.zeros([BM, BN], tl.float32)
        gate_scale = scale_at(record, n, first_n, 0, G, BK)
        up_scale = scale_at(record, n, first_n, 0, U, BK)
        for start in tl.range(0, H, BK, num_stages=STAGES):
            c = start + tl.arange(0, BK)
            a = tl.load(
                x + row[:, None] * H + c[None, :], mask=used[:, None] & (c < H)[None, :], other=0.0
            )
            g = weights(record, n, gate_scale, start, G, ALIGN, BK, DOT)
            u = weights(record, n, up_scale, start, U, ALIGN, BK, DOT)
            next_gate = scale_at(record, n, first_n, start + BK, G, BK)
            next_up = scale_at(record, n, first_n, start + BK, U, BK)
            a = a.to(DOT.dtype)
            acc_gate = add_dot(acc_gate, a, g, gate_scale, G, DOT)
            acc_up = add_dot(acc_up, a, u, up_scale, U, DOT)
            gate_scale, up_scale = next_gate, next_up
        acc_gate = finish(acc_gate, record, record, False, n, G, False)
        acc_up = finish(acc_up, record, record, False, n, U, False)
        value = activate(acc_gate, acc_up, A)
        tl.store(
            h + at[:, None] * I + n[None, :],
            value.to(h.dtype.element_ty),
            mask=used[:, None] & (n < I)[None, :],
        )


@triton.jit
def _down_kernel(
    h, route, block_expert, block_begin, block_end, address, y, E,
    D: tl.constexpr, ALIGN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = D.rows
    I: tl.constexpr = D.columns
    tiles: tl.constexpr = (H + BN - 1) // BN
    block = tl.program_id(0) // tiles
    expert = tl.load(block_expert + block)
    if expert < E:
        record = tl.load(address + expert)
        at = tl.load(block_begin + block) + tl.arange(0, BM)
        used = at < tl.load(block_end + block)
        first_n = tl.program_id(0) % tiles * BN
        n = first_n + tl.arange(0, BN)
        acc = tl.zeros([BM, BN], tl.float32)
        scale = scale_at(record, n, first_n, 0, D, BK)
        for start in tl.range(0, I, BK, num_stages=STAGES):
            c = start + tl.arange(0, BK)
            a = tl.load(
                h + at[:, None] * I + c[None, :], mask=used[:, None] & (c < I)[None, :], other=0.0
            )
            w = weights(record, n, scale, start, D, ALIGN, BK, DOT)
            next_scale = scale_at(record, n, first_n, start + BK, D, BK)
            acc = add_dot(acc, a.to(DOT.dtype), w, scale, D, DOT)
            scale = next_scale
        acc = finish(acc, record, record, False, n, D, False)
        to = tl.load(route + at, mask=used, other=0)
        tl.store(y + to[:, None] * H + n[None, :], acc, mask=used[:, None] & (n < H)[None, :])


class Tile(NamedTuple):
    rows: int
    columns: int  # of the output
    inner: int
    warps: int
    stages: int


def tile_of(routes_per_expert: float, act: torch.dtype, *, scaled: bool) -> Tile:
    """Tile sizes by how many rows an expert gets on average, within 100 KB of shared memory.

    Weights that are widened on the way need registers, so more warps hold the largest tile.
    """
    if act == torch.float32:
        return Tile(32, 32, 32, 4, 1)
    if routes_per_expert <= 16:
        return Tile(16, 64, 128, 4, 3)
    if routes_per_expert <= 48:
        return Tile(32, 64, 64, 4, 4)
    if routes_per_expert <= 96:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 64, 64, 8 if scaled else 4, 3)


def moe_prefill(
    x: torch.Tensor,  # [T, H] act, contiguous
    ids: torch.Tensor,  # [T, K] int32, contiguous, -1: route not in use
    weights: torch.Tensor,  # [T, K] float32, contiguous
    address: torch.Tensor,  # [E] int64, contiguous
    layout: ExpertLayout,
    activation: Activation = SILU,
) -> torch.Tensor:  # [T, H] float32
    def block(at: slice) -> torch.Tensor:
        y = route_products(x[at], ids[at], address, layout, activation)
        return combine(y, ids[at], weights[at])

    blocks = [block(at) for at in token_blocks(len(x), ids.shape[1], x.shape[1])]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def route_products(
    x: torch.Tensor,  # [T, H] act, contiguous
    ids: torch.Tensor,  # [T, K] int32, contiguous, -1: route not in use
    address: torch.Tensor,  # [E] int64, contiguous
    layout: ExpertLayout,
    activation: Activation = SILU,
) -> torch.Tensor:  # [T * K, H] float32: what each route in use adds, without its weight
    (T, H), K, E = x.shape, ids.shape[1], address.shape[0]
    assert layout.hidden == H and len(ids) == T, (x.shape, ids.shape)
    assert all(a.is_contiguous() for a in (x, ids, address)), (x.stride(), ids.stride())
    assert address.dtype == torch.int64, address.dtype
    tile = tile_of(T * K / E, x.dtype, scaled=layout.format.scaled)
    blocks = group(ids, E, tile.rows)
    h = torch.empty(T * K, layout.inner, dtype=x.dtype, device=x.device)
    y = torch.empty(T * K, H, dtype=torch.float32, device=x.device)
    gate, up, down = (stored(m) for m in layout.matrices.values())
    shared = dict(  # noqa: C408 - arguments, as a call spells them
        ALIGN=alignment(layout), BM=tile.rows, BN=tile.columns, BK=tile.inner,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    num_blocks = len(blocks.expert)
    _gate_up_kernel[(num_blocks * triton.cdiv(gate.rows, tile.columns),)](
        x, *blocks, address, h, E,
        K=K, G=gate, U=up, A=activation, DOT=dot_type(gate, x.dtype), **shared,
    )  # fmt: skip
    _down_kernel[(num_blocks * triton.cdiv(H, tile.columns),)](
        h, *blocks, address, y, E, D=down, DOT=dot_type(down, x.dtype), **shared
    )
    return y
