"""Which expert a program of ``moe_decode`` serves and for whom, and where its record goes."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ExpertLayout

CHUNK = tl.constexpr(4096)
BEGIN_ALIGN = tl.constexpr(16)  # divides parts of experts, and is divided by blocks of rows


@triton.jit
def served(ids, r, T: tl.constexpr, K: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr):
    """The expert of route ``r``, -1 if an earlier route does its work; which routes name it."""
    t = tl.arange(0, TP)[:, None]
    k = tl.arange(0, KP)[None, :]
    expert = tl.load(ids + r)
    names = tl.load(ids + t * K + k, mask=(t < T) & (k < K), other=-1) == expert  # [TP, KP]
    if T > 1:
        earlier = tl.max(tl.max((names & (t * K + k < r)).to(tl.int32), axis=1), axis=0)
        expert = tl.where(earlier > 0, -1, expert)
    else:
        names = (t * K + k) == r
    return expert, names


@triton.jit
def targets(address, fill, expert, FILL: tl.constexpr):
    """The expert's record, where to store it, and whether."""
    record = tl.load(address + expert)
    to = record
    if FILL:
        to = tl.load(fill + expert)
    return record, to, to != 0


@triton.jit
def begin_of(both, expert, BOTH: tl.constexpr):
    """The first of the expert's inner rows that are computed here: the CPU has those before."""
    begin = 0
    if BOTH:
        begin = tl.where(tl.load(both) == expert, tl.load(both + 1), 0)
        begin = tl.multiple_of(begin, BEGIN_ALIGN)
    return begin


@triton.jit
def first_block(begin, ROWS: tl.constexpr):
    """A program's first block of rows; what lies before ``begin`` is nobody's."""
    return begin // ROWS + tl.program_id(1)


@triton.jit
def copy_rest(record, to, store, REST: tl.constexpr):
    """Copy the parts of a record that no row owns, with one program; see ``rest_of``."""
    byte = tl.arange(0, CHUNK)
    for part in tl.static_range(len(REST)):
        source = (record + REST[part][0]).to(tl.pointer_type(tl.uint8))
        target = (to + REST[part][0]).to(tl.pointer_type(tl.uint8))
        inside = (byte < REST[part][1]) & store
        tl.store(target + byte, tl.load(source + byte, mask=inside, other=0), mask=inside)


def rest_of(layout: ExpertLayout) -> tuple[tuple[int, int], ...]:
    """What is not stored with the rows of a record: parts of at most CHUNK bytes, (start, size).

    Scales of tiles and factors, which many rows share, gaps, and padding.
    """
    owned = []
    for m in layout.matrices.values():
        owned.append((m.offset, m.offset + m.data_bytes))
        if m.format.scaled and m.format.scale_rows == 1:
            owned.append((m.scale_offset, m.scale_offset + m.scale_bytes))
        if m.bias_offset is not None:
            owned.append((m.bias_offset, m.bias_offset + 4 * m.rows))
    rest, begin = [], 0
    for start, end in [*sorted(owned), (layout.record_bytes, layout.record_bytes)]:
        for part in range(begin, start, CHUNK.value):
            rest.append((part, min(CHUNK.value, start - part)))
        begin = end
    return tuple(rest)
