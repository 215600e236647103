"""Causal grouped-query attention over paged keys and values; prefill and decode are one kernel.

A program owns BQ rows of the batch and the G query heads that share a kv head: M = BQ*G rows of
one matrix product, so that keys and values are read once for all of them. Decode is BQ = 1; there
the positions are also split over programs and a second kernel merges their partial softmaxes, so
that one sequence fills the GPU. The grid depends on shapes alone: a captured graph stays right as
sequences grow, and splits that have nothing to do end at once.

Decode is memory-bound: reads 2*NKV*D numbers for each position. Prefill: 4*N*D flops for each pair
of query and key, on tensor cores with float32 sums; probabilities are rounded to act for the second
product. Rows of a block may belong to several sequences; the program then takes one after the
other. Rows with a negative sequence or position give zeros. A sink, a logit without a value, joins
the softmax last. Reference: ``TorchOps.attention``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import LINE_BYTES, chained, let_next_start, prefetch, wait_for_earlier
from .numbers import power_of_2, wide_dot

PROGRAMS = 264  # what splitting aims at: two for each of 132 processors
MAX_SPLITS = 64
LOG2_E = tl.constexpr(1.4426950408889634)
DECODE_ROWS = 16  # up to here every row is its own block: rows then mostly are sequences


@triton.jit
def _first_key(last, window, BK: tl.constexpr, WINDOWED: tl.constexpr):
    """Where a row at position ``last`` begins to look."""
    first = last * 0
    if WINDOWED:
        first = tl.maximum(last - window + 1, 0) // BK * BK
    return first


@triton.jit
def _prefetch_tile(
    k_pages, v_pages, page_table, seq, first, last, M, kv_head,
    NKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BK: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Bring the keys and values from ``first`` on to the L2 cache, while q is still computed."""
    p = tl.minimum(first + tl.arange(0, BK), last)
    table = page_table + seq.to(tl.int64) * M
    page = tl.load(table + p // PAGE, cache_modifier=".cg").to(tl.int64)
    place = ((page * PAGE + p % PAGE) * NKV + kv_head) * D
    line = tl.minimum(tl.arange(0, LINES) * LINE, D - 1)
    prefetch(k_pages + place[:, None] + line[None, :], CHAINED)
    prefetch(v_pages + place[:, None] + line[None, :], CHAINED)


@triton.jit
def _attention_kernel(
    q, k_pages, v_pages, page_table, sequence, position, sinks, out, partial, stats,
    T, M, scale, window,
    N: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SINKS: tl.constexpr,
    BQ: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, WINDOWED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    G: tl.constexpr = N // NKV
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.arange(0, BQ * GP)
    row = tl.program_id(0) * BQ + m // GP
    head = kv_head * G + m % GP
    used = (row < T) & (m % GP < G)
    d = tl.arange(0, DP)
    key = tl.arange(0, BK)
    at = (row.to(tl.int64) * N + head)[:, None] * D + d[None, :]  # [BQ * GP, DP]
    whose = row
    if BQ == 1:
        whose = tl.program_id(0) + tl.arange(0, 1)  # of one row, nothing is compared below
    # there since before the embedding, a kernel of torch's; past the L1 cache all the same
    pos = tl.load(position + whose, mask=whose < T, other=-1, cache_modifier=".cg")
    seq = tl.load(sequence + whose, mask=whose < T, other=-1, cache_modifier=".cg")
    seq = tl.where(pos >= 0, seq, -1)
    if BQ == 1 and CHAINED:
        whom, end = tl.max(seq, axis=0), tl.max(pos, axis=0)
        begin = _first_key(end, window, BK, WINDOWED)
        begin += split * tl.cdiv(tl.cdiv(end + 1 - begin, BK), SPLITS) * BK
        if (whom >= 0) & (begin <= end):
            _prefetch_tile(
                k_pages, v_pages, page_table, whom, begin, end, M, kv_head,
                NKV, D, PAGE, BK, LINE, LINES, CHAINED,
            )  # fmt: skip
    wait_for_earlier(CHAINED)
    queries = tl.load(q + at, mask=used[:, None] & (d < D)[None, :], other=0.0)
    if WIDE:
        queries = queries.to(tl.float32)
    top = tl.full([BQ * GP], float("-inf"), tl.float32)
    norm = tl.zeros([BQ * GP], tl.float32)
    acc = tl.zeros([BQ * GP, DP], tl.float32)
    none: tl.constexpr = 2147483647
    current = tl.min(tl.where(seq >= 0, seq, none), axis=0)
    while current != none:
        mine = seq == current
        last = tl.max(tl.where(mine, pos, 0), axis=0)
        first = _first_key(tl.min(tl.where(mine, pos, none), axis=0), window, BK, WINDOWED)
        if SPLITS > 1:
            share = tl.cdiv(tl.cdiv(last + 1 - first, BK), SPLITS) * BK
            first += split * share
            last = tl.minimum(last, first + share - 1)
        table = page_table + current.to(tl.int64) * M
        for start in tl.range(first, last + 1, BK, num_stages=STAGES):
            p = start + key
            page = tl.zeros([BK], tl.int32)
            for j in tl.static_range(BK // PAGE if BK > PAGE else 1):  # few, and at once
                number = tl.load(table + start // PAGE + j, mask=start + j * PAGE <= last, other=0)
                page = tl.where(key // PAGE == j, number, page)
            place = ((page.to(tl.int64) * PAGE + p % PAGE) * NKV + kv_head) * D
            k = tl.load(
                k_pages + place[None, :] + d[:, None],
                mask=(p <= last)[None, :] & (d < D)[:, None],
                other=0.0,
            )
            v = tl.load(
                v_pages + place[:, None] + d[None, :],
                mask=(p <= last)[:, None] & (d < D)[None, :],
                other=0.0,
            )
            if WIDE:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(queries, k, input_precision="ieee") * (scale * LOG2_E)
            seen = mine[:, None] & (p[None, :] <= pos[:, None]) & (p <= last)[None, :]
            if WINDOWED:
                seen &= p[None, :] > pos[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no NaN
            weight = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            norm = norm * shrink + tl.sum(weight, axis=1)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            top = higher
        current = tl.min(tl.where(seq > current, seq, none), axis=0)
    if SPLITS > 1:
        line = (row.to(tl.int64) * N + head) * SPLITS + split
        inside = used[:, None] & (d < D)[None, :] & (norm > 0.0)[:, None]
        tl.store(partial + line[:, None] * D + d[None, :], acc, mask=inside)
        tl.store(stats + line * 2, top, mask=used)
        tl.store(stats + line * 2 + 1, norm, mask=used)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=used, other=0.0) * LOG2_E
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            norm = norm * shrink + tl.exp2(sink - higher)
            acc = acc * shrink[:, None]
        acc = acc / tl.where(norm > 0.0, norm, 1.0)[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=used[:, None] & (d < D)[None, :])


@triton.jit
def _merge_kernel(
    partial, stats, sinks, position, out, window,
    N: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr,
    SPLITS: tl.constexpr, SP: tl.constexpr, DP: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, WINDOWED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    line = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    d = tl.arange(0, DP)
    busy = SPLITS
    if BQ == 1:  # as many as have a tile: the others' memory need not be read
        last = tl.load(position + line // N, cache_modifier=".cg")  # as in the kernel before
        tiles = tl.cdiv(last + 1 - _first_key(last, window, BK, WINDOWED), BK)
        busy = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, SPLITS), 1))
    wait_for_earlier(CHAINED)
    top = tl.load(stats + (line * SPLITS + s) * 2, mask=s < busy, other=float("-inf"))
    norm = tl.load(stats + (line * SPLITS + s) * 2 + 1, mask=s < busy, other=0.0)
    highest = tl.max(top, axis=0)
    if SINKS:
        sink = tl.load(sinks + line % N) * LOG2_E
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen: no NaN
    shrink = tl.exp2(tl.where(norm > 0.0, top, float("-inf")) - base)
    inside = (norm > 0.0)[:, None] & (d < D)[None, :]
    at = partial + (line * SPLITS + s)[:, None] * D + d[None, :]
    # of splits that saw nothing it is whatever lay there; a mask would wait for their norms
    part = tl.load(at, mask=(s < busy)[:, None] & (d < D)[None, :], other=0.0)
    part = tl.where(inside, part, 0.0)
    total = tl.sum(norm * shrink, axis=0)
    if SINKS:
        total += tl.exp2(sink - highest)
    merged = tl.sum(part * shrink[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + line * D + d, merged.to(out.dtype.element_ty), mask=d < D)


def attention(
    q: torch.Tensor,  # [T, N, D] act, contiguous
    k_pages: torch.Tensor,  # [P, page_tokens, NKV, D] act, contiguous, pages of a power of two
    v_pages: torch.Tensor,  # [P, page_tokens, NKV, D] act, contiguous
    page_table: torch.Tensor,  # [B, M] int32, contiguous
    sequence: torch.Tensor,  # [T] int32
    position: torch.Tensor,  # [T] int32
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,  # [N] float32
) -> torch.Tensor:  # [T, N, D] act
    T, N, D = q.shape
    _, page, kv_heads, _ = k_pages.shape
    pages = page_table.shape[1]
    assert all(a.is_contiguous() for a in (q, k_pages, v_pages, page_table)), q.stride()
    assert q.dtype == k_pages.dtype == v_pages.dtype, (q.dtype, k_pages.dtype)
    assert k_pages.shape == v_pages.shape and k_pages.shape[3] == D, (q.shape, k_pages.shape)
    assert N % kv_heads == 0 and page == power_of_2(page), (N, kv_heads, page)
    assert sinks is None or (sinks.shape == (N,) and sinks.dtype == torch.float32), sinks.shape
    out = torch.empty_like(q)
    if T == 0:
        return out
    tile = tile_of(T, N // kv_heads, D, q.dtype)
    line = LINE_BYTES // q.element_size()
    splits = num_splits(triton.cdiv(T, tile.rows) * kv_heads, triton.cdiv(pages * page, tile.keys))
    partial, stats = out, out  # not read
    logits = out if sinks is None else sinks
    if splits > 1:
        partial = torch.empty(T * N * splits, D, dtype=torch.float32, device=q.device)
        stats = torch.empty(T * N * splits, 2, dtype=torch.float32, device=q.device)
    _attention_kernel[(triton.cdiv(T, tile.rows), kv_heads, splits)](
        q, k_pages, v_pages, page_table, sequence, position, logits, out, partial, stats,
        T, pages, scale, window or 0,
        N=N, NKV=kv_heads, D=D, PAGE=page, SINKS=sinks is not None,
        BQ=tile.rows, GP=tile.heads, DP=tile.channels, BK=tile.keys,
        SPLITS=splits, WINDOWED=window is not None, WIDE=wide_dot(q.dtype), STAGES=tile.stages,
        LINE=line, LINES=power_of_2(triton.cdiv(D, line)),
        num_warps=tile.warps, **chained(q),
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(T * N,)](
            partial, stats, logits, position, out, window or 0,
            N=N, D=D, SINKS=sinks is not None,
            SPLITS=splits, SP=power_of_2(splits), DP=tile.channels,
            BQ=tile.rows, BK=tile.keys, WINDOWED=window is not None,
            num_warps=4, **chained(q),
        )  # fmt: skip
    return out


class Tile(NamedTuple):
    rows: int  # of the batch, BQ
    heads: int  # G padded to a power of two
    channels: int  # D padded
    keys: int  # positions at a time, BK
    warps: int
    stages: int


def tile_of(rows: int, group: int, head_dim: int, act: torch.dtype) -> Tile:
    """Tile sizes that fit the shared memory of an sm_86 (100 KB)."""
    heads = power_of_2(group)
    channels = max(16, power_of_2(head_dim))
    if rows <= DECODE_ROWS:
        heads = max(heads, 16)  # rows are the least a tensor core takes; the padding is not read
        keys = 16 if act == torch.float32 else 64 if channels <= 128 else 32
        return Tile(1, heads, channels, keys, 4, 2)
    if act == torch.float32:
        return Tile(max(1, 32 // heads), heads, channels, 16, 4, 1)
    block = max(1, (128 if channels <= 128 else 64) // heads)
    warps = 8 if block * heads >= 128 else 4
    return Tile(block, heads, channels, 64 if channels <= 128 else 32, warps, 2)


def num_splits(programs: int, tiles: int) -> int:
    """Programs that share a block's positions, if all blocks are ``programs`` programs.

    A power of two: a kernel is compiled for each number.
    """
    splits = max(1, min(PROGRAMS // programs, tiles, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)
