"""Dividing a layer's experts between slots, link and CPU, and adding up what each computed.

    divide    one program: who computes which route, what is stored on the way, the question to the
              CPU: stored in its mailbox, then a new number at its bell
    merge     a program for (row, columns): waits for the answer if something was asked, then adds
              in the order of k

Numbers at bell and answer grow and wrap around, so a captured launch needs no constant that would
differ between replays. Waiting backs off: a program looks, sleeps, and looks again.
Reference: ``kernels.divide``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..activation import Activation
from ..divide import FETCHED, KEYS, ON_CPU, STORED, WANTED, Shared
from ..formats import ExpertLayout
from .launch import chained, let_next_start, prefetch, wait_for_earlier
from .moe_decode import combine
from .numbers import INTERPRETED, matrix, power_of_2, tl_dtype
from .ops import CudaOps
from .route import chosen_by

SLEEP_NS = 100  # between two looks over the link
COPY_COLUMNS = 1024
MERGE_COLUMNS = 512

_STORED, _WANTED = tl.constexpr(STORED), tl.constexpr(WANTED)
_FETCHED, _ON_CPU, _KEYS = tl.constexpr(FETCHED), tl.constexpr(ON_CPU), tl.constexpr(KEYS)


@triton.jit
def _ring(bell, number, SIGNAL: tl.constexpr):
    """Everything stored before is seen by whoever sees the number."""
    if SIGNAL:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.relaxed.sys.global.u32 [$1], $2; mov.u32 $0, $2;",
            "=r,l,r", [bell, number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(bell.to(tl.pointer_type(tl.int32)), number)


@triton.jit
def _look(answer, SIGNAL: tl.constexpr):
    """What is loaded afterwards is what was stored before the number that is seen."""
    if SIGNAL:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];",
            "=r,l", [answer], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        seen = tl.load(answer.to(tl.pointer_type(tl.int32)))
    return seen


@triton.jit
def _sleep(nanoseconds, SIGNAL: tl.constexpr):
    if SIGNAL:
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, $1;",
            "=r,r", [nanoseconds], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["row"])
def _divide_kernel(
    ids, logits, weights, active, x, address, worth, fetch_of, lent, fill, report, asked, both,
    log, here, bell, head, box_ids, box_x, slots_begin, slots_end, row,
    T: tl.constexpr, K: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr, PART_ROWS: tl.constexpr, CHOOSE: tl.constexpr, NORMALISE: tl.constexpr,
    MOST: tl.constexpr, LENT: tl.constexpr, ACT: tl.constexpr,
    RP: tl.constexpr, EP: tl.constexpr, HP: tl.constexpr,
    CPU: tl.constexpr, SIGNAL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    e = tl.arange(0, EP)
    prefetch(address + tl.minimum(e, E - 1), CHAINED)
    prefetch(worth + tl.minimum(e, E - 1), CHAINED)
    prefetch(lent + tl.minimum(e, LENT - 1), CHAINED)
    prefetch(report + tl.minimum(e, LENT), CHAINED)
    prefetch(fetch_of + tl.minimum(e, MOST), CHAINED)
    prefetch(active, CHAINED)
    prefetch(asked, CHAINED)
    wait_for_earlier(CHAINED)
    r = tl.arange(0, RP)
    on = r < T * K
    in_use = on & (tl.load(active + r // K, mask=on, other=0).to(tl.int32) != 0)
    if CHOOSE:  # of one row
        expert, weight = chosen_by(logits, E, K, NORMALISE, EP, RP)
        expert = tl.where(in_use, expert, -1)
        tl.store(weights + r, weight, mask=on)
    else:
        expert = tl.load(ids + r, mask=in_use, other=-1)
    in_use = in_use & (expert >= 0)
    tl.store(log + r, expert, mask=on)
    record = tl.load(address + expert, mask=in_use, other=0)
    missed = in_use & ((record < slots_begin) | (record >= slots_end))
    stored_worth = tl.load(worth + expert, mask=missed, other=0.0)
    value = tl.where(stored_worth >= 0, stored_worth, -stored_worth - 1)
    same = expert[:, None] == expert[None, :]
    earlier = tl.sum((same & (r[None, :] < r[:, None])).to(tl.int32), axis=1)
    first = missed & (earlier == 0)  # one route of each expert
    count = tl.sum(first.to(tl.int32), axis=0)
    parts = count * PARTS  # on the link
    if CPU:
        parts = tl.minimum(tl.load(fetch_of + tl.minimum(count, MOST)), parts)
    fetched, over = parts // PARTS, parts % PARTS
    better = (value[None, :] > value[:, None]) | (
        (value[None, :] == value[:, None]) & (expert[None, :] < expert[:, None])
    )
    rank = tl.sum((first[None, :] & better).to(tl.int32), axis=1)
    on_cpu = missed & (rank >= fetched)
    only_there = missed & (rank >= fetched + (over > 0).to(tl.int32))
    tl.store(here + r, tl.where(only_there, -1, expert), mask=on)
    divided = tl.max(tl.where(first & (rank == fetched) & (over > 0), expert, -1), axis=0)
    their_rows = tl.where(divided >= 0, (PARTS - over) * PART_ROWS, 0)
    tl.store(both, divided)
    tl.store(both + 1, their_rows)

    admitted = first & (rank < fetched) & (stored_worth >= 0)
    before = tl.sum((admitted[None, :] & (rank[None, :] < rank[:, None])).to(tl.int32), axis=1)
    taken = tl.load(report + _STORED)
    wanted = tl.load(report + _WANTED)
    fetched_before = tl.load(report + _FETCHED)
    on_cpu_before = tl.load(report + _ON_CPU)
    place = taken + before
    slot = tl.load(lent + place, mask=admitted & (place < LENT), other=0)
    tl.store(fill + e, tl.zeros([EP], tl.int64), mask=e < E)
    tl.debug_barrier()  # all have loaded and cleared what is stored now
    store = slot != 0
    tl.store(fill + expert, slot, mask=store)
    tl.store(report + _KEYS + place, row * E + expert, mask=store)
    tl.store(report + _STORED, taken + tl.sum(store.to(tl.int32), axis=0))
    tl.store(report + _WANTED, wanted + tl.sum(admitted.to(tl.int32), axis=0))
    tl.store(report + _FETCHED, fetched_before + parts)
    tl.store(report + _ON_CPU, on_cpu_before + count * PARTS - parts)

    if CPU:
        asks = count > fetched
        number = tl.load(asked + 1) + 1
        tl.debug_barrier()
        if asks:
            theirs = box_ids.to(tl.pointer_type(tl.int32)) + r
            tl.store(theirs, tl.where(on_cpu, expert, -1), mask=on)
            box = tl.multiple_of(box_x.to(tl.pointer_type(ACT)), 16)
            h = tl.arange(0, HP)
            for t in tl.static_range(T):
                for start in tl.static_range(0, H, HP):
                    c = start + h
                    part = tl.load(x + t * H + c, mask=c < H, other=0.0)
                    tl.store(box + t * H + c, part, mask=c < H)
            to = head.to(tl.pointer_type(tl.int32))
            tl.store(to, row)
            tl.store(to + 1, T)
            tl.store(to + 2, divided)
            tl.store(to + 3, their_rows)
            tl.store(asked + 1, number)
            tl.debug_barrier()  # every thread has stored its part of the question
            _ring(bell, number, SIGNAL)
        tl.store(asked, asks.to(tl.int32))


@triton.jit
def summed_by_all(
    y, log, here, weights, asked, both, answer, box_y, t, h,
    K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, SLEEP: tl.constexpr,
    CPU: tl.constexpr, SIGNAL: tl.constexpr,
):  # fmt: skip
    """Columns ``h`` of a row's sum, after the CPU's answer has come if it was asked."""
    divided = -1
    if CPU:
        asks, number = tl.load(asked), tl.load(asked + 1)
        divided = tl.load(both)
        if asks != 0:
            while _look(answer, SIGNAL) - number < 0:
                _sleep(SLEEP, SIGNAL)
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        route = t * K + k
        mine = tl.load(here + route) >= 0
        value = tl.load(y + route * H + h, mask=h < H, other=0.0)
        value = tl.where(mine, value, 0.0)  # as a mask of the load, it would be waited for
        if CPU:
            expert = tl.load(log + route)
            theirs = (expert >= 0) & ((mine == 0) | (expert == divided))
            at = matrix(box_y, tl.float32, 16) + route * H + h
            value += tl.load(at, mask=(h < H) & theirs, other=0.0, cache_modifier=".cv")
        acc += tl.load(weights + route) * value
    return acc


@triton.jit
def _merge_kernel(
    y, log, here, weights, out, asked, both, answer, box_y,
    K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, SLEEP: tl.constexpr,
    CPU: tl.constexpr, SIGNAL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = summed_by_all(
        y, log, here, weights, asked, both, answer, box_y, t, h,
        K, H, BLOCK, SLEEP, CPU, SIGNAL,
    )  # fmt: skip
    tl.store(out + t * H + h, acc, mask=h < H)


def divide(
    shared: Shared,
    row: int,
    ids: torch.Tensor,  # [T, K] int32, contiguous
    active: torch.Tensor,  # [T] bool
    x: torch.Tensor,  # [T, H] act, contiguous
    log: torch.Tensor,  # [T, K] int32, written
    here: torch.Tensor,  # [T, K] int32, written
) -> None:
    """See ``kernels.divide.divide``."""
    _divide(shared, row, ids, None, None, False, active, x, log, here)


def choose_and_divide(
    ops: CudaOps,
    shared: Shared,
    row: int,
    logits: torch.Tensor,  # [1, E] float32, contiguous
    normalise: bool,
    active: torch.Tensor,  # [1] bool
    x: torch.Tensor,  # [1, H] act, contiguous
    log: torch.Tensor,  # [1, K] int32, written
    here: torch.Tensor,  # [1, K] int32, written
) -> torch.Tensor:  # [1, K] float32: the weights of the choice
    """See ``kernels.divide.choose_and_divide``; one launch."""
    assert logits.shape == (1, shared.address.shape[1]) and logits.is_contiguous(), logits.shape
    assert logits.dtype == torch.float32 and len(x) == 1, (logits.dtype, x.shape)
    weights = torch.empty(log.shape, dtype=torch.float32, device=log.device)
    _divide(shared, row, log, logits, weights, normalise, active, x, log, here)
    return weights


def _divide(
    shared: Shared,
    row: int,
    ids: torch.Tensor,
    logits: torch.Tensor | None,
    weights: torch.Tensor | None,
    normalise: bool,
    active: torch.Tensor,
    x: torch.Tensor,
    log: torch.Tensor,
    here: torch.Tensor,
) -> None:
    (T, K), H, E = ids.shape, x.shape[1], shared.address.shape[1]
    assert all(a.is_contiguous() for a in (ids, active, x, log, here)), (ids.stride(), x.stride())
    box = shared.mailbox
    places: tuple[int, ...] = (0, 0, 0, 0)
    if box is not None:
        assert box.x.dtype == x.dtype and len(box.x) >= T, (box.x.dtype, x.shape)
        places = tuple(part.data_ptr() for part in (box.bell, box.head, box.ids, box.x))
    routes, fetch_of = power_of_2(T * K), shared.fetch_of_rows(T)
    _divide_kernel[(1,)](
        ids, ids if logits is None else logits, ids if weights is None else weights,
        active, x, shared.address[row], shared.worth[row], fetch_of, shared.lent,
        shared.fill, shared.report, shared.asked, shared.both, log, here, *places, *shared.slots,
        row, T=T, K=K, H=H, E=E, PARTS=shared.parts, PART_ROWS=shared.part_rows,
        CHOOSE=logits is not None, NORMALISE=normalise,
        MOST=len(fetch_of) - 1, LENT=len(shared.lent),
        ACT=tl_dtype(x.dtype), RP=routes, EP=power_of_2(E), HP=min(COPY_COLUMNS, power_of_2(H)),
        CPU=box is not None, SIGNAL=not INTERPRETED, num_warps=1 if routes <= 16 else 4,
        **chained(ids),
    )  # fmt: skip


def products(
    ops: CudaOps,
    shared: Shared,
    row: int,
    x: torch.Tensor,  # [T, H] act, contiguous
    here: torch.Tensor,  # [T, K] int32
    layout: ExpertLayout,
    activation: Activation,
) -> torch.Tensor:  # [T * K, H] float32
    """See ``kernels.divide.products``."""
    both = shared.both if shared.parts > 1 and shared.mailbox is not None else None
    address = shared.address[row]
    return ops.route_products(x, here, address, layout, activation, shared.fill, both)


def route_products(
    ops: CudaOps,
    x: torch.Tensor,  # [T, H] act, contiguous
    ids: torch.Tensor,  # [T, K] int32, contiguous
    address: torch.Tensor,  # [E] int64
    layout: ExpertLayout,
    activation: Activation,
) -> torch.Tensor:  # [T * K, H] float32
    """See ``kernels.divide.route_products``."""
    return ops.route_products(x, ids, address, layout, activation)


def add_up(
    y: torch.Tensor,  # [T * K, H] float32
    ids: torch.Tensor,  # [T, K] int32
    weights: torch.Tensor,  # [T, K] float32
) -> torch.Tensor:  # [T, H] float32
    """See ``kernels.divide.add_up``."""
    return combine(y, ids, weights)


def merge(
    shared: Shared,
    y: torch.Tensor,  # [T * K, H] float32, contiguous
    log: torch.Tensor,  # [T, K] int32
    here: torch.Tensor,  # [T, K] int32
    weights: torch.Tensor,  # [T, K] float32, contiguous
) -> torch.Tensor:  # [T, H] float32
    """See ``kernels.divide.merge``."""
    (T, K), H = log.shape, y.shape[1]
    assert all(a.is_contiguous() for a in (y, log, here, weights)), (y.stride(), log.stride())
    box = shared.mailbox
    answer, box_y = (box.answer.data_ptr(), box.y.data_ptr()) if box is not None else (0, 0)
    out = torch.empty(T, H, dtype=torch.float32, device=y.device)
    block = min(MERGE_COLUMNS, power_of_2(H))
    _merge_kernel[(T, triton.cdiv(H, block))](
        y, log, here, weights, out, shared.asked, shared.both, answer, box_y,
        K=K, H=H, BLOCK=block, SLEEP=SLEEP_NS, CPU=box is not None, SIGNAL=not INTERPRETED,
        num_warps=4, **chained(y),
    )  # fmt: skip
    return out
