"""One token for each row of logits, without a sort and without a wait: fit for a captured graph.

    adjust    biases, penalties, mask; of each block of the vocabulary the largest, and what is bad
    narrow    in 16 passes, 8 of them only if a row has top_k, 8 if one has top_p. The smallest kept
              x = (logit - largest) / temperature is found, four of its bits a pass: for x <= 0 bits
              are in order, so it is enough to count for 15 candidates a pass what they would keep:
              tokens for top_k first, then mass for top_p
    mass      of each block
    pick      the block in which the uniform number falls, then the token within it
    rank, logprobs   if a row asks for it: the best of each block, and of all, and the model's own
              log-probabilities

Masses are whole numbers, units of 2**-44 of the most likely token's: their sum does not depend on
the order of additions, and neither does a draw. Reads and writes B * V a few times, from the L2
cache. Reference: ``ftd.kernels.sample.sample_ref``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ftd.kernels.sample import (
    BIASED,
    LOGPROBS,
    MASKED,
    MOST_TOP,
    PENALISED,
    Drawn,
    Kept,
    Rows,
    Shapes,
    mask_words,
)

from .launch import chained, let_next_start, wait_for_earlier
from .numbers import power_of_2

BLOCK = 2048  # of the vocabulary, for one program
PART = 512  # of it for which 15 candidates fit into registers
PASSES = 8  # of four bits
TOP = power_of_2(MOST_TOP)
FLAGS = {"BIASED": BIASED, "PENALISED": PENALISED, "MASKED": MASKED, "LOGPROBS": LOGPROBS}
ALL = tl.constexpr(0x7FFFFFFF)  # no x has greater bits: everything is kept
LEAST = tl.constexpr(-(1 << 63))  # no order is less


class Work:
    """What kernels leave for the next: of ``batch`` rows at most, one launch at a time."""

    def __init__(self, batch: int, vocab: int, device: torch.device | str) -> None:
        self.blocks = triton.cdiv(vocab, BLOCK)

        def space(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(batch, *shape, dtype=dtype, device=device)

        self.x = space(vocab, dtype=torch.float32)
        self.best = space(self.blocks, dtype=torch.int64)
        self.bad = space(self.blocks, dtype=torch.int32)
        self.sums = space(self.blocks, 2, dtype=torch.float32)  # largest logit, Σ exp of the rest
        self.measures = space(2, self.blocks, 16, dtype=torch.int64)
        # bits known before each pass; then those of the smallest x kept by top_k, and by all
        self.known = space(2 * PASSES + 2, dtype=torch.int32)
        self.mass = space(self.blocks, dtype=torch.int64)
        self.ranked = space(self.blocks, TOP, dtype=torch.int64)


@triton.jit
def _order(x, v):
    """A number that is the larger, the larger ``x``, and of equal ones the smaller ``v``."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # there is but one zero
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - v).to(tl.int64)


@triton.jit
def _value(order):
    bits = (order >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _index(order):
    return 0x7FFFFFFF - (order & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _bits(x):
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _units(x):
    """exp(x) for x <= 0, as a whole number."""
    return (tl.exp(x).to(tl.float64) * 17592186044416.0 + 0.5).to(tl.int64)


@triton.jit
def _largest(best, b, NB, NBP: tl.constexpr):
    """Of a row, from those of its blocks."""
    j = tl.arange(0, NBP)
    return tl.max(tl.load(best + b * NB + j, mask=j < NB, other=LEAST), axis=0)


@triton.jit(do_not_specialize=["R"])
def _adjust_kernel(
    logits, floats, ints, counts, bias, mask, x_out, best, bad, sums, R, V, NB, W,
    FULL: tl.constexpr, BIASED: tl.constexpr, PENALISED: tl.constexpr, MASKED: tl.constexpr,
    LOGPROBS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    b, j = tl.program_id(0), tl.program_id(1)
    v = j * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    at = b.to(tl.int64) * V + v
    x = tl.load(logits + at, mask=inside, other=float("-inf"))
    finite = tl.abs(x) < float("inf")  # not so for NaN
    tl.store(bad + b * NB + j, tl.sum((inside & (finite == 0)).to(tl.int32), axis=0))
    if FULL:
        slot = tl.load(ints + R + b).to(tl.int64) * V
        flags = tl.load(ints + 2 * R + b)
        if flags & LOGPROBS:
            most = tl.max(x, axis=0)
            tl.store(sums + (b * NB + j) * 2, most)
            tl.store(sums + (b * NB + j) * 2 + 1, tl.sum(tl.exp(x - most), axis=0))
        if flags & BIASED:
            x += tl.load(bias + slot + v, mask=inside, other=0.0)
        if flags & PENALISED:
            count = tl.load(counts + slot + v, mask=inside, other=0)
            times = (count >> 1).to(tl.float32)
            repetition = tl.load(floats + 4 * R + b)
            once = tl.where(times > 0, tl.load(floats + 2 * R + b), 0.0)
            away = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
            x = tl.where(count > 0, away, x) - (once + tl.load(floats + 3 * R + b) * times)
        if flags & MASKED:
            word = tl.load(mask + b * W + v // 32, mask=inside, other=0)
            x = tl.where((word >> (v % 32)) & 1 != 0, x, float("-inf"))
        x = tl.where(inside, x, float("-inf"))
        tl.store(x_out + at, x, mask=inside)
    tl.store(best + b * NB + j, tl.max(_order(x, v), axis=0))


@triton.jit
def _narrowed(
    measures, known, doubles, ints, b, R, NB, number,
    BY_K: tl.constexpr, PASSES: tl.constexpr, NBP: tl.constexpr,
):  # fmt: skip
    """The bits of the smallest kept x as far as they are known after pass ``number``."""
    j = tl.arange(0, NBP)
    d = tl.arange(0, 16)
    place = ((b * 2 + number % 2) * NB + j[:, None]) * 16 + d[None, :]
    reached = tl.sum(tl.load(measures + place, mask=(j < NB)[:, None], other=0), axis=0)
    if BY_K:
        enough = reached >= tl.load(ints + b).to(tl.int64)
    else:
        whole = tl.sum(tl.where(d == 15, reached, 0), axis=0)
        enough = reached.to(tl.float64) >= tl.load(doubles + R + b) * whole.to(tl.float64)
    digit = tl.sum(((d < 15) & (enough == 0)).to(tl.int32), axis=0)
    before = tl.load(known + b * (2 * PASSES + 2) + number)
    return before | (digit << (4 * (PASSES - 1 - number % PASSES)))


@triton.jit(do_not_specialize=["R", "number"])
def _narrow_kernel(
    x_ptr, best, doubles, floats, ints, measures, known, R, V, NB, number,
    BY_K: tl.constexpr, FIRST: tl.constexpr, PASSES: tl.constexpr, NBP: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    b, j = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(floats + b)
    if temperature == 0:
        return
    top_k = tl.load(ints + b)
    by_k = (top_k > 0) & (top_k < V)
    mine = known + b * (2 * PASSES + 2)
    row = x_ptr + b.to(tl.int64) * V
    least_of_k = tl.full([], ALL, tl.int32)
    if BY_K:
        if FIRST:
            most = _value(_largest(best, b, NB, NBP))
            v = j * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(row + v, mask=v < V, other=float("-inf"))
            x = tl.where(most > float("-inf"), x - most, 0.0)  # nothing is allowed: whatever
            tl.store(row + v, tl.div_rn(x, temperature + tl.zeros_like(x)), mask=v < V)
            tl.debug_barrier()  # other threads read it below
        if by_k == 0:
            return
    else:
        if FIRST:
            if by_k:
                least_of_k = _narrowed(
                    measures, known, doubles, ints, b, R, NB, number - 1, True, PASSES, NBP
                )
            if j == 0:
                tl.store(mine + 2 * PASSES, least_of_k)
        else:
            least_of_k = tl.load(mine + 2 * PASSES)
        if tl.load(doubles + R + b) >= 1:
            return
    bits = tl.full([], 0, tl.int32)
    if not FIRST:
        bits = _narrowed(measures, known, doubles, ints, b, R, NB, number - 1, BY_K, PASSES, NBP)
    if j == 0:
        tl.store(mine + number, bits)
    shift = 4 * (PASSES - 1 - number % PASSES)
    d = tl.arange(0, 16)
    upto = bits | (d << shift) | ((tl.full([16], 1, tl.int32) << shift) - 1)
    upto = tl.where((d == 15) | (upto < 0), ALL, upto)
    some = tl.zeros([PART, 16], tl.int32 if BY_K else tl.int64)
    for part in range(BLOCK // PART):
        at = j * BLOCK + part * PART + tl.arange(0, PART)
        y = tl.load(row + at, mask=at < V, other=float("-inf"))
        key = _bits(y)
        below = (key[:, None] <= upto[None, :]) & (at < V)[:, None]
        if BY_K:
            some += below.to(tl.int32)
        else:
            mass = tl.where(key <= least_of_k, _units(y), 0)
            some += tl.where(below, mass[:, None], 0)
    reached = tl.sum(some, axis=0).to(tl.int64)
    tl.store(measures + ((b * 2 + number % 2) * NB + j) * 16 + d, reached)


@triton.jit(do_not_specialize=["R"])
def _mass_kernel(
    x_ptr, best, doubles, floats, ints, measures, known, mass, R, V, NB,
    FULL: tl.constexpr, PASSES: tl.constexpr, NBP: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    b, j = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(floats + b)
    if temperature == 0:
        return
    v = j * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + b.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    if FULL:
        mine = known + b * (2 * PASSES + 2)
        least = tl.minimum(tl.load(mine + 2 * PASSES), _bits(tl.load(floats + R + b)))
        if tl.load(doubles + R + b) < 1:
            last = 2 * PASSES - 1
            least = tl.minimum(
                least, _narrowed(measures, known, doubles, ints, b, R, NB, last, False, PASSES, NBP)
            )
        if j == 0:
            tl.store(mine + 2 * PASSES + 1, least)
        units = tl.where(_bits(x) <= least, _units(x), 0)
    else:
        x = x - _value(_largest(best, b, NB, NBP))
        units = _units(tl.div_rn(x, temperature + tl.zeros_like(x)))
    tl.store(mass + b * NB + j, tl.sum(units, axis=0))


@triton.jit(do_not_specialize=["R"])
def _pick_kernel(
    x_ptr, best, bad, doubles, floats, ints, counts, known, mass, tokens, bad_out, ids, R, V, NB,
    FULL: tl.constexpr, PENALISED: tl.constexpr, PASSES: tl.constexpr, NBP: tl.constexpr,
    BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    b = tl.program_id(0)
    j = tl.arange(0, NBP)
    tl.store(bad_out + b, tl.sum(tl.load(bad + b * NB + j, mask=j < NB, other=0), axis=0))
    most = _largest(best, b, NB, NBP)
    token = _index(most)
    temperature = tl.load(floats + b)
    if temperature != 0:
        blocks = tl.load(mass + b * NB + j, mask=j < NB, other=0)
        upto = tl.cumsum(blocks, axis=0)
        whole = tl.sum(blocks, axis=0)
        aim = (whole.to(tl.float64) * tl.load(doubles + b)).to(tl.int64)
        block = tl.sum((upto <= aim).to(tl.int32), axis=0)
        before = tl.sum(tl.where(j < block, blocks, 0), axis=0)
        v = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + b.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
        if FULL:
            units = tl.where(
                _bits(x) <= tl.load(known + b * (2 * PASSES + 2) + 2 * PASSES + 1), _units(x), 0
            )
        else:
            units = _units(tl.div_rn(x - _value(most), temperature + tl.zeros_like(x)))
        within = tl.cumsum(units, axis=0) + before
        token = block * BLOCK + tl.sum((within <= aim).to(tl.int32), axis=0)
    token = tl.minimum(tl.maximum(token, 0), V - 1)  # of a row that is not finite: whatever
    tl.store(ids + b, token.to(tl.int64))
    if FULL:
        if tl.load(ints + 2 * R + b) & PENALISED:
            count = counts + tl.load(ints + R + b).to(tl.int64) * V + token
            tl.store(count, tl.load(count) + 2)
        token = tl.where(tl.abs(_value(most)) < float("inf"), token, -1)
    tl.store(tokens + b, token.to(tl.int64))


@triton.jit(do_not_specialize=["R"])
def _rank_kernel(
    logits, ints, ranked, R, V, NB,
    LOGPROBS: tl.constexpr, MOST: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    b, j = tl.program_id(0), tl.program_id(1)
    if tl.load(ints + 2 * R + b) & LOGPROBS == 0:
        return
    v = j * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    tl.store(ranked + (b * NB + j) * TOP + tl.arange(0, TOP), _best(_order(x, v), MOST, TOP))


@triton.jit
def _best(order, MOST: tl.constexpr, TOP: tl.constexpr):
    """The MOST largest, in order, at the beginning of TOP."""
    place = tl.arange(0, TOP)
    found = tl.full([TOP], LEAST, tl.int64)
    for i in range(MOST):
        most = tl.max(order, axis=0)
        found = tl.where(place == i, most, found)
        order = tl.where(order == most, LEAST, order)
    return found


@triton.jit(do_not_specialize=["R"])
def _logprobs_kernel(
    logits, ints, sums, ranked, tokens, logprob, top, top_logprobs, R, V, NB,
    LOGPROBS: tl.constexpr, MOST: tl.constexpr, TOP: tl.constexpr, NBP: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    b = tl.program_id(0)
    if tl.load(ints + 2 * R + b) & LOGPROBS == 0:
        return
    j = tl.arange(0, NBP)
    most = tl.load(sums + (b * NB + j) * 2, mask=j < NB, other=float("-inf"))
    rest = tl.load(sums + (b * NB + j) * 2 + 1, mask=j < NB, other=0.0)
    largest = tl.max(most, axis=0)
    norm = largest + tl.log(tl.sum(rest * tl.exp(most - largest), axis=0))
    token = tl.maximum(tl.load(tokens + b), 0)
    tl.store(logprob + b, tl.load(logits + b.to(tl.int64) * V + token) - norm)
    at = tl.arange(0, NBP * TOP)
    order = tl.load(ranked + b * NB * TOP + at, mask=at < NB * TOP, other=LEAST)
    found = _best(order, MOST, TOP)
    place = tl.arange(0, TOP)
    tl.store(top + b * MOST + place, _index(found), mask=place < MOST)
    tl.store(top_logprobs + b * MOST + place, _value(found) - norm, mask=place < MOST)


def sample(
    logits: torch.Tensor,  # [B, V] float32, contiguous, not changed
    rows: Rows,
    kept: Kept,
    mask: torch.Tensor,  # [B, ceil(V / 32)] int32
    out: Drawn,
    ids: torch.Tensor,  # [B] int64: the tokens once more, always in the vocabulary
    work: Work,
    shapes: Shapes,  # what any row needs
) -> None:
    """``sample_ref`` as 3 launches, or 5 to 21 if more than a temperature is needed."""
    B, V, R = *logits.shape, rows.padded
    assert logits.is_contiguous() and logits.dtype == torch.float32, (logits.stride(), logits.dtype)
    assert len(work.x) >= B and work.x.shape[1] == V, (logits.shape, work.x.shape)
    NB = work.blocks
    grid = (B, NB)
    doubles, floats, ints = rows.doubles, rows.floats, rows.ints
    common = {"NBP": power_of_2(NB), "BLOCK": BLOCK, "enable_fp_fusion": False, **chained(logits)}
    _adjust_kernel[grid](
        logits, floats, ints, kept.counts, kept.bias, mask, work.x, work.best, work.bad, work.sums,
        R, V, NB, mask_words(V),
        FULL=shapes.full, **FLAGS, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
        **chained(logits),
    )  # fmt: skip
    x = logits
    if shapes.full:
        x = work.x
        # the first pass of either kind also prepares what comes behind
        for number in (
            *range(PASSES if shapes.by_k else 1),
            *range(PASSES, 2 * PASSES if shapes.by_p else PASSES + 1),
        ):
            _narrow_kernel[grid](
                x, work.best, doubles, floats, ints, work.measures, work.known, R, V, NB, number,
                BY_K=number < PASSES, FIRST=number % PASSES == 0, PASSES=PASSES, PART=PART,
                num_warps=8, **common,
            )  # fmt: skip
    _mass_kernel[grid](
        x, work.best, doubles, floats, ints, work.measures, work.known, work.mass, R, V, NB,
        FULL=shapes.full, PASSES=PASSES, num_warps=8, **common,
    )  # fmt: skip
    _pick_kernel[(B,)](
        x, work.best, work.bad, doubles, floats, ints, kept.counts, work.known, work.mass,
        out.tokens, out.bad, ids, R, V, NB,
        FULL=shapes.full, PENALISED=PENALISED, PASSES=PASSES, num_warps=8, **common,
    )  # fmt: skip
    if shapes.ranked:
        _rank_kernel[grid](
            logits, ints, work.ranked, R, V, NB,
            LOGPROBS=LOGPROBS, MOST=MOST_TOP, TOP=TOP, BLOCK=BLOCK, num_warps=8,
            **chained(logits),
        )  # fmt: skip
        _logprobs_kernel[(B,)](
            logits, ints, work.sums, work.ranked, out.tokens, out.logprob, out.top,
            out.top_logprobs, R, V, NB,
            LOGPROBS=LOGPROBS, MOST=MOST_TOP, TOP=TOP, NBP=power_of_2(NB), num_warps=8,
            **chained(logits),
        )  # fmt: skip
