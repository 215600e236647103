"""What the launchers share: names of number types, and whether kernels run in the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Fixed at import, as triton's decorators fix it. Products of bfloat16 matrices are wrong there.
INTERPRETED: bool = triton.knobs.runtime.interpret


def tl_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of bfloat16, float16 or float32."""
    found: tl.dtype = getattr(tl, str(dtype).removeprefix("torch."))
    return found


def wide_dot(act: torch.dtype) -> bool:
    """Whether matrix products run in float32: for float32 activations and in the interpreter."""
    return act == torch.float32 or INTERPRETED


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return triton.next_power_of_2(n)


@triton.jit
def matrix(address, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """A pointer to ``DTYPE`` at ``address``; without the promise, loads would be narrow."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGN)
