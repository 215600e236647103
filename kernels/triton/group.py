"""Routes sorted by expert and cut into blocks of rows, for ``moe_prefill``: one launch, no wait.

One program an expert. It counts the routes of the experts before its own, then gathers its own in
their order: reads all ids twice, from the cache but for the first time. No program needs another's
result, so an expert's blocks have numbers that leave room for those of all experts before it:
expert e, whose routes begin at s, has the blocks from s // rows + e on. Blocks between say E.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

SCAN = 2048  # ids looked at together


class Blocks(NamedTuple):
    """Which rows of which expert each program computes: the grid's blocks in order."""

    route: torch.Tensor  # [R] int64, routes in use sorted by expert; what follows them is not set
    expert: torch.Tensor  # [NB] int64, E: the block is not needed
    begin: torch.Tensor  # [NB] int64, into ``route``
    end: torch.Tensor  # [NB] int64


def group_ref(ids: torch.Tensor, num_experts: int, block_rows: int) -> Blocks:
    """Torch reference: same inputs, same result."""
    flat = ids.flatten().long()
    route = torch.sort(torch.where(flat < 0, num_experts, flat), stable=True).indices
    count = torch.bincount(flat[flat >= 0], minlength=num_experts)  # [E]
    start = count.cumsum(0) - count
    first = start // block_rows + torch.arange(num_experts, device=ids.device)
    expert = torch.full((num_blocks(len(flat), num_experts, block_rows),), num_experts)
    begin, end = torch.zeros_like(expert), torch.zeros_like(expert)
    for e, (at, s, n) in enumerate(zip(first.tolist(), start.tolist(), count.tolist())):
        for i in range(-(-n // block_rows)):
            expert[at + i] = e
            begin[at + i] = s + i * block_rows
            end[at + i] = min(s + (i + 1) * block_rows, s + n)
    return Blocks(route, *(x.to(ids.device) for x in (expert, begin, end)))


def num_blocks(routes: int, num_experts: int, block_rows: int) -> int:
    """As many as any routing could need."""
    return routes // block_rows + num_experts


@triton.jit
def _group_kernel(
    ids, route, block_expert, block_begin, block_end, R, E,
    BM: tl.constexpr, SCAN: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0)
    lane = tl.arange(0, SCAN)
    before = tl.zeros([SCAN], tl.int32)
    mine = tl.zeros([SCAN], tl.int32)
    for at in range(0, R, SCAN):
        chosen = tl.load(ids + at + lane, mask=at + lane < R, other=-1)
        before += ((chosen >= 0) & (chosen < e)).to(tl.int32)
        mine += (chosen == e).to(tl.int32)
    start = tl.sum(before, axis=0)
    end = start + tl.sum(mine, axis=0)
    to = start
    for at in range(0, R, SCAN):
        here = tl.load(ids + at + lane, mask=at + lane < R, other=-1) == e
        place = tl.cumsum(here.to(tl.int32), axis=0)
        tl.store(route + to + place - 1, (at + lane).to(tl.int64), mask=here)
        to += tl.sum(here.to(tl.int32), axis=0)
    first = start // BM + e
    last = end // BM + e + 1  # where the next expert's blocks begin
    if e == E - 1:
        last = R // BM + E
    for at in range(first, last, WRITE):
        block = at + tl.arange(0, WRITE)
        begin = start + (block - first) * BM
        needed = begin < end
        inside = block < last
        tl.store(block_expert + block, tl.where(needed, e, E).to(tl.int64), mask=inside)
        tl.store(block_begin + block, begin.to(tl.int64), mask=inside)
        tl.store(block_end + block, tl.minimum(begin + BM, end).to(tl.int64), mask=inside)


def group(
    ids: torch.Tensor,  # [T, K] int32, contiguous, -1: route not in use
    num_experts: int,
    block_rows: int,
) -> Blocks:
    assert ids.is_contiguous() and ids.dtype == torch.int32, (ids.stride(), ids.dtype)
    routes = ids.numel()
    blocks = num_blocks(routes, num_experts, block_rows)
    assert routes + block_rows < 2**31, routes
    held = torch.empty(3, blocks + blocks % 2, dtype=torch.int64, device=ids.device)
    route = torch.empty(routes, dtype=torch.int64, device=ids.device)
    parts = Blocks(route, *held[:, :blocks].unbind(0))  # each begins at a multiple of 16 bytes
    _group_kernel[(num_experts,)](
        ids, *parts, routes, num_experts,
        BM=block_rows, SCAN=SCAN, WRITE=64, num_warps=8,
    )  # fmt: skip
    return parts
