"""Copy a small block of pinned host memory to the device by the reads of a kernel.

The copy engine of a direction works through what it is given: behind hundreds of MB on their way a
copy of a few bytes waits for milliseconds. The reads of a kernel share the link with it instead.
Reference: ``target.copy_(source)``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 4096  # each program has 16 KiB on their way at a time
MOST_PROGRAMS = 32  # enough to fill a fast link


@triton.jit(do_not_specialize=["N"])
def _pull_kernel(source, target, N, BLOCK: tl.constexpr):
    words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    for begin in range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        if begin + BLOCK <= N:  # without a mask: 16 bytes a load
            tl.store(target + at, tl.load(words + at))
        else:
            tl.store(target + at, tl.load(words + at, mask=at < N), mask=at < N)


def pull(
    source: torch.Tensor,  # pinned; any dtype, contiguous, of whole words of four bytes
    target: torch.Tensor,  # on the device, alike; the memory of both begins at 16 bytes
) -> None:
    """``source`` must not change before the kernel has run."""
    num_bytes = source.nbytes
    assert num_bytes == target.nbytes and num_bytes % 4 == 0, (source.shape, target.shape)
    assert source.is_contiguous() and target.is_contiguous(), (source.stride(), target.stride())
    words = target.flatten().view(torch.int32)
    programs = min(triton.cdiv(len(words), BLOCK_WORDS), MOST_PROGRAMS)
    _pull_kernel[(programs,)](source.data_ptr(), words, len(words), BLOCK=BLOCK_WORDS, num_warps=4)
