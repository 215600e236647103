"""Where the rows of a captured decode step stand: one launch where torch would need ten.

One program for all rows. Reference: ``kernels.places``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..places import Places
from .launch import chained, let_next_start, wait_for_earlier
from .numbers import power_of_2


@triton.jit
def _places_kernel(
    position, page_table, active, at, place, M, page_tokens, scratch_page,
    B: tl.constexpr, BP: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    b = tl.arange(0, BP)
    given = tl.load(position + b, mask=b < B, other=-1)
    used = given >= 0
    p = tl.where(used, given, 0)
    page = tl.load(page_table + b * M + p // page_tokens, mask=used, other=0).to(tl.int64)
    page = tl.where(used, page, scratch_page)
    tl.store(active + b, used.to(tl.int8), mask=b < B)
    tl.store(at + b, p.to(tl.int32), mask=b < B)
    tl.store(place + b, page * page_tokens + p % page_tokens, mask=b < B)


def places(
    position: torch.Tensor,  # [B] int64, contiguous
    page_table: torch.Tensor,  # [B, M] int32, contiguous
    page_tokens: int,
    scratch_page: int,
) -> Places:
    B, M = page_table.shape
    assert position.shape == (B,) and page_table.is_contiguous(), (position.shape, page_table.shape)
    active = torch.empty(B, dtype=torch.bool, device=position.device)
    at = torch.empty(B, dtype=torch.int32, device=position.device)
    place = torch.empty(B, dtype=torch.int64, device=position.device)
    _places_kernel[(1,)](
        position, page_table, active.view(torch.int8), at, place, M, page_tokens, scratch_page,
        B=B, BP=power_of_2(B), num_warps=1, **chained(position),
    )  # fmt: skip
    return Places(active, at, place)
