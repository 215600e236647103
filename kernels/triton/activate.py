"""How gate and up become h, inside a kernel: ``kernels.activation``."""

from __future__ import annotations

import triton
import triton.language as tl

ANY = tl.constexpr(3.4e38)  # a limit beyond it is none


@triton.jit
def activate(gate, up, A: tl.constexpr):
    """(up + shift) · gate · sigmoid(alpha · gate), both clamped; ``A``: an ``Activation``."""
    if A.limit < ANY:
        gate = tl.minimum(gate, A.limit)
        up = tl.minimum(tl.maximum(up, -A.limit), A.limit)
    if A.shift != 0.0:
        up = up + A.shift
    if A.alpha != 1.0:
        h = gate / (1.0 + tl.exp(-gate * A.alpha)) * up
    else:
        h = gate / (1.0 + tl.exp(-gate)) * up
    return h
